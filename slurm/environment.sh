# shellcheck shell=bash
# What the scripts beside this one have in common; they read it from the checkout, where `sbatch` is called.
#
# Python: the environment of `make setup`. The checkout, the model and the run directory must be at the same place on every node.
python=${ASYNCMOE_PYTHON:-.venv/bin/python}
if ! command -v "$python" > /dev/null; then
    echo "error: $python: got no such program in $PWD, expected Python with asyncmoe; call sbatch in the checkout after make setup, or set ASYNCMOE_PYTHON" >&2
    exit 2
fi

# Containers, where the site has enroot and pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage): every part of the run then starts in one,
# and only the program that starts them (no GPU, no SGLang) outside. Mounts are SRC:DST and must hold the checkout, the model and the run
# directory under the same paths as outside.
# export ASYNCMOE_CONTAINER_IMAGE=/shared/images/asyncmoe.sqsh
# export ASYNCMOE_CONTAINER_MOUNTS=/shared:/shared
# export ASYNCMOE_CONTAINER_PYTHON=python3

# Networks. Nothing is set, because nothing is right for every site; set what yours needs, here or before sbatch, which hands it on.
# `asyncmoe doctor` shows a node's interfaces and InfiniBand devices.
#
# NCCL looks for the other ranks over the first IP interface that is neither loopback nor docker. Name another one when nodes do not reach
# each other over that one (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
# export NCCL_SOCKET_IFNAME=ib0
#
# gloo (checkpoints, and everything on CPU) takes the address of the host's name. Where /etc/hosts gives that 127.0.1.1, as Debian does,
# ranks of two nodes never meet (https://pytorch.org/docs/stable/distributed.html, "Choosing the network interface to use").
# export GLOO_SOCKET_IFNAME=ib0
#
# NCCL takes every InfiniBand port that is up, those of storage too. "=mlx5_0,mlx5_3" takes exactly these.
# export NCCL_IB_HCA==mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11
#
# The address of our own sockets and of the engines is not NCCL's: cluster.network of the configuration. `slurm` runs of several nodes
# take that of the host's name unless the configuration says ib0 or 10.1.0.0/16.
#
# CUDA_DEVICE_MAX_CONNECTIONS=1 is set by trainer ranks for themselves where trainer.tp > 1 (asyncmoe/trainer/model/connections.py), however they
# are started. In an engine it would only serialize streams: do not export it here.
