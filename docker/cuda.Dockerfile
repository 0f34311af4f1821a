# docker build -f docker/cuda.Dockerfile -t asyncmoe:cuda . && docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 asyncmoe:cuda
# Driver 580 or newer on the host. The build needs no GPU; it says that it prepares for machines that have one.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /asyncmoe
COPY . .
RUN make setup GPU=1
CMD ["make", "demo", "GPU=1"]
