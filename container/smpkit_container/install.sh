#!/bin/sh
# Turn a base image into a training image: `install.sh base`, then `install.sh smpkit`; run by the Dockerfile.
set -eu
here=/tmp/smpkit-build

has() { command -v "$1" >/dev/null 2>&1; }

# ---- certificates --------------------------------------------------------------------------------------------------
# A system that has not installed ca-certificates yet cannot be told of new ones: its package manager and pip are
# pointed at the file meanwhile, and at the end it is added to the system's own.
if ls "$here"/*.crt >/dev/null 2>&1; then
  cat /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt "$here"/*.crt >/tmp/ca.pem 2>/dev/null || true
  export PIP_CERT=/tmp/ca.pem SSL_CERT_FILE=/tmp/ca.pem CURL_CA_BUNDLE=/tmp/ca.pem REQUESTS_CA_BUNDLE=/tmp/ca.pem
  if has apt-get; then echo 'Acquire::https::CAInfo "/tmp/ca.pem";' >/etc/apt/apt.conf.d/99smpkit-build; fi
fi

# ---- system packages -----------------------------------------------------------------------------------------------
# ssh and Open MPI are for jobs that ask for MPI. The compiler and Python's headers are for what torch.compile compiles
# while a job runs (Triton, too).
compiles() { [ "${COMPILER:-1}" != 0 ]; }
has_headers() {
  python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null
}

install_system() {
  if has apt-get; then
    ssh=openssh-client mpi=openmpi-bin compiler=g++ headers=python3-dev
  elif has dnf; then
    ssh=openssh-clients mpi=openmpi compiler=gcc-c++ headers=python3-devel
  else
    echo "error: the base image has neither apt-get nor dnf" >&2
    exit 1
  fi
  missing=""
  need() { has "$1" || missing="$missing $2"; }
  need python3 python3; need ssh $ssh; need mpirun $mpi
  [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
  python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
  if compiles; then
    need g++ $compiler
    has_headers || missing="$missing $headers"
  fi
  if has apt-get; then
    [ -s /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
    if [ -n "$missing" ]; then
      apt-get update
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
      rm -rf /var/lib/apt/lists/*
    fi
  else
    need ssh-keygen openssh
    if [ -n "$missing" ]; then
      dnf install -y $missing
      dnf clean all
    fi
    if ! has mpirun && [ -x /usr/lib64/openmpi/bin/mpirun ]; then ln -s /usr/lib64/openmpi/bin/mpirun /usr/local/bin/; fi
  fi
  # Host keys that the package made are the same in every container of the image: jobs make their own.
  rm -f /etc/ssh/ssh_host_*
}

# ---- Python packages -----------------------------------------------------------------------------------------------
# Into the system's Python, which in an image belongs to nobody else; newer Debians have to be told that it is meant.
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
export PIP_FIND_LINKS="$here" PIP_PROGRESS_BAR=off

install_smpkit() {
  ours=$(ls "$here"/source/smpkit-*.whl 2>/dev/null | tail -n 1 || true)
  python3 -m pip install "${ours:-$here/source}[torch]"
  python3 -c 'import torch, smpkit.torch, smpkit_container'
  mkdir -p /opt/ml/code
}

# ---- what was asked for --------------------------------------------------------------------------------------------
case "$1" in
  base) install_system; python3 -m pip install $TORCH_OPTIONS "$TORCH" "numpy>=1.26" ;;
  smpkit) install_smpkit ;;
esac
if [ -f /tmp/ca.pem ]; then
  if has update-ca-certificates; then cp "$here"/*.crt /usr/local/share/ca-certificates/ && update-ca-certificates
  elif has update-ca-trust; then cp "$here"/*.crt /etc/pki/ca-trust/source/anchors/ && update-ca-trust; fi
  rm -f /tmp/ca.pem /etc/apt/apt.conf.d/99smpkit-build
fi
