#   docker build -t mcore_rl .
#   docker run --rm --gpus all --ipc host -v "$PWD/outputs:/workspace/mcore_rl/outputs" mcore_rl mcore-rl doctor
# NVIDIA's image brings torch for CUDA, numpy, Transformer Engine and NCCL; docs/versions.md lists releases that fit. The
# tests check the instructions, and build the image on python:3.12-slim where there is a Docker daemon or buildah.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}
WORKDIR /workspace/mcore_rl

# The image pins its own packages by PIP_CONSTRAINT, against the versions of constraints-gpu.txt.
ENV PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1
COPY pyproject.toml constraints-gpu.txt README.md LICENSE ./
COPY mcore_rl mcore_rl
RUN pip install --constraint constraints-gpu.txt --editable '.[tensorboard,report,math]'
COPY . .
CMD ["mcore-rl", "doctor"]
