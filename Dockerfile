# The image in which a job's ranks run: on SageMaker, or on this machine with `smpkit run --docker`.
#
#   docker build --build-arg BASE_IMAGE=debian:bookworm-slim .
#
# BASE_IMAGE may be plain (Debian, Ubuntu, Amazon Linux, with or without Python) or bring PyTorch along (AWS's deep
# learning containers, pytorch/pytorch, NVIDIA's): what is there already is kept. The build context may hold
#   wheels/*.whl   packages to be preferred over the index, such as a PyTorch build of yours
#   ca/*.crt       certificates of a proxy that the build has to trust
#   smpkit-*.whl   smpkit itself; without it, the context is a checkout and is built
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE}

# What pip installs PyTorch from; for example "--index-url https://download.pytorch.org/whl/cpu" in TORCH_OPTIONS.
ARG TORCH="torch>=2.11"
ARG TORCH_OPTIONS=""

# 0 leaves out a C++ compiler and Python's headers, without which torch.compile fails on GPUs.
ARG COMPILER=1

# In two layers: what changes seldom and takes minutes, then smpkit, which takes seconds.
COPY container/smpkit_container/install.sh wheels/*.whl ca/*.crt /tmp/smpkit-build/
RUN sh /tmp/smpkit-build/install.sh base
COPY . /tmp/smpkit-build/source
RUN sh /tmp/smpkit-build/install.sh smpkit && rm -rf /tmp/smpkit-build

# Exec form: the launcher must be the first process itself, for that is the one that SIGTERM is sent to. With -P, no
# `json.py` among the sources, which lie in this folder, stands in its way.
ENV PYTHONUNBUFFERED=1
WORKDIR /opt/ml/code
ENTRYPOINT ["python3", "-P", "-m", "smpkit_container"]
CMD ["train"]
