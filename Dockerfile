# This image is not built or tested here: the development machines have no GPU and no Docker.
#   docker build -t mcore_rl .
#   docker run --rm --gpus all --ipc host -v "$PWD/outputs:/workspace/mcore_rl/outputs" mcore_rl mcore-rl doctor
# NVIDIA's image brings torch for CUDA, Transformer Engine and NCCL; RELEASE needs Transformer Engine 2.9 to 2.11.
ARG RELEASE=25.11
FROM nvcr.io/nvidia/pytorch:${RELEASE}-py3
WORKDIR /workspace/mcore_rl

# The image pins its own packages by PIP_CONSTRAINT, which contradicts constraints.txt; the image's torch is kept.
ENV PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY mcore_rl mcore_rl
RUN grep -v '^torch==' constraints.txt >/tmp/constraints.txt \
    && pip install --constraint /tmp/constraints.txt --editable '.[test,ray,math]'
COPY . .
CMD ["mcore-rl", "doctor"]
