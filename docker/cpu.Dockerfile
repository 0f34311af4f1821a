# docker build -f docker/cpu.Dockerfile -t asyncmoe:cpu . && docker run --rm --shm-size=2g asyncmoe:cpu make demo
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /asyncmoe
COPY . .
RUN make setup
CMD ["make", "demo"]
