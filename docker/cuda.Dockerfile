# docker build -f docker/cuda.Dockerfile -t asyncmoe:cuda . && docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 asyncmoe:cuda
# On machines with InfiniBand, docker run also needs --device /dev/infiniband.
# Driver 580 or newer on the host. The build needs no GPU; it says that it prepares for machines that have one.
FROM python:3.11-slim-bookworm
# NCCL opens libibverbs at run time; without it, and a driver for the adapter, machines with InfiniBand talk over TCP.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make libibverbs1 ibverbs-providers librdmacm1 \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /asyncmoe
# The trainer's packages and Transformer Engine's build, with all that they read: a layer that other changes leave as it is.
COPY Makefile ./
COPY requirements requirements
COPY asyncmoe/build.py asyncmoe/
COPY asyncmoe/doctor/python_probe.py asyncmoe/doctor/versions.py asyncmoe/doctor/
RUN make transformer-engine GPU=1
COPY . .
RUN make setup GPU=1
CMD ["make", "demo", "GPU=1"]
