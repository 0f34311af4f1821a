# shellcheck shell=bash
# Settings shared by the scripts in this directory, which source this file from the checkout, where `sbatch` is called.
#
# Python: the environment of `make setup`. The checkout, the model and the run directory must have the same paths on every node.
python=${ASYNCMOE_PYTHON:-.venv/bin/python}
if ! command -v "$python" > /dev/null; then
    echo "error: $python: got no such program in $PWD, expected Python with asyncmoe; call sbatch in the checkout after make setup, or set ASYNCMOE_PYTHON" >&2
    exit 2
fi

# Containers, on sites with enroot and pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage): every part of the run starts in a container;
# only the launcher (no GPU, no SGLang) runs outside. Mounts are SRC:DST and must include the checkout, the model and the run directory
# under the same paths as outside.
# export ASYNCMOE_CONTAINER_IMAGE=/shared/images/asyncmoe.sqsh
# export ASYNCMOE_CONTAINER_MOUNTS=/shared:/shared
# export ASYNCMOE_CONTAINER_PYTHON=python3

# Networks. Nothing is set, because no setting suits every site; set your site's variables here or before sbatch, which passes them on.
# `ip address` shows a node's interfaces, `asyncmoe doctor` its InfiniBand ports.
#
# NCCL contacts other ranks over the first IP interface that is neither loopback nor docker. Name a different interface if nodes cannot
# reach each other over it (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
# export NCCL_SOCKET_IFNAME=ib0
#
# gloo (checkpoints, and all communication on CPU) uses the address of the host name. If /etc/hosts maps the name to 127.0.1.1, as on
# Debian, ranks of two nodes cannot rendezvous (https://pytorch.org/docs/stable/distributed.html, "Choosing the network interface to use").
# export GLOO_SOCKET_IFNAME=ib0
#
# NCCL uses every InfiniBand port that is up, including storage ports. "=mlx5_0,mlx5_3" restricts it to exactly these.
# export NCCL_IB_HCA==mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11
#
# asyncmoe's own sockets and the engines do not follow NCCL's settings but cluster.network of the configuration. SLURM runs on several
# nodes use the address of the host name unless the configuration names a network such as ib0 or 10.1.0.0/16.
#
# Trainer ranks set CUDA_DEVICE_MAX_CONNECTIONS=1 themselves if trainer.tp > 1 (asyncmoe/trainer/model/connections.py), with every
# launcher. Do not export it here: in an engine it would only serialize streams.
