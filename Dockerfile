# This image is not built or tested here: the development machines have no GPU and no Docker.
#   docker build -t mcore_rl .
#   docker run --rm --gpus all --ipc host -v "$PWD/outputs:/workspace/mcore_rl/outputs" mcore_rl mcore-rl doctor
# NVIDIA's image brings torch for CUDA, numpy, Transformer Engine and NCCL; docs/versions.md lists releases that fit.
ARG RELEASE=26.06
FROM nvcr.io/nvidia/pytorch:${RELEASE}-py3
WORKDIR /workspace/mcore_rl

# The image pins its own packages by PIP_CONSTRAINT, against the versions of constraints-gpu.txt.
ENV PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1
COPY pyproject.toml constraints-gpu.txt README.md LICENSE ./
COPY mcore_rl mcore_rl
RUN pip install --constraint constraints-gpu.txt --editable '.[tensorboard,report,math]'
COPY . .
CMD ["mcore-rl", "doctor"]
