"""The optimizers' kernels in C++, compiled when first needed.

One loop reads each array once. The compiler that torch's own would use (`CXX`, else c++, g++ or clang++) makes it in
a fraction of a second, for the processor it runs on. Called through ctypes, which lets other Python threads run
meanwhile; torch.compile's kernels hold them up, and took 1.4 times as long (benchmarks/offload_model).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

__all__ = ["Function", "function"]

Function = Callable[[Sequence[int], int, Sequence[float]], None]
"""Takes the arrays' addresses (gradient, master, state..., working copy), their length, and the rule's constants."""

_LOG: Final = logging.getLogger(__name__)
_SECONDS: Final = 60.0
_MOST_ARRAYS: Final = 5

_TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
    torch.float16: "_Float16",
}

_SOURCE: Final = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16& operator=(float value) {  // to the nearest, ties to even, as torch rounds; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    bits = (uint16_t)(value != value ? 0x7fc0u : rounded);
    return *this;
  }
};

#ifdef HAS_WEIGHT
#define STORE(value) weight[i] = (value)
#else
#define WEIGHT float
#define STORE(value)
#endif

// One step of elements [start, end). `weight` is where the working copy of `start` goes.
#define RULE(name) \
  static inline __attribute__((always_inline)) void name##_part( \
      void** arrays, int64_t start, int64_t end, WEIGHT* __restrict weight, const float* c)
#define ARRAY(type, number) ((type*)arrays[number] + start)

RULE(adam) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  float* __restrict first = ARRAY(float, 2);
  float* __restrict second = ARRAY(float, 3);
  const float enter1 = 1 - c[0], beta2 = c[1], enter2 = 1 - c[1], eps = c[2], decay = c[3], l2 = c[4], size = c[5];
  const float correction = 1 / c[6], factor = c[7];  // dividing once per element: the divider is what is busiest
  for (int64_t i = 0; i < end - start; i++) {
    const float x = (float)gradient[i] * factor + l2 * master[i];
    const float m = first[i] + enter1 * (x - first[i]);
    const float v = second[i] * beta2 + enter2 * x * x;
    const float p = master[i] * decay - size * (m / (std::sqrt(v) * correction + eps));
    first[i] = m;
    second[i] = v;
    master[i] = p;
    STORE(p);
  }
}

RULE(sgd) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  const float lr = c[0], l2 = c[1], factor = c[6];
  for (int64_t i = 0; i < end - start; i++) {
    const float p = master[i] - lr * ((float)gradient[i] * factor + l2 * master[i]);
    master[i] = p;
    STORE(p);
  }
}

RULE(sgd_momentum) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  float* __restrict momentum = ARRAY(float, 2);
  const float lr = c[0], l2 = c[1], keep = c[2], enter = c[3], of_gradient = c[4], of_momentum = c[5], factor = c[6];
  for (int64_t i = 0; i < end - start; i++) {
    const float x = (float)gradient[i] * factor + l2 * master[i];
    const float b = keep * momentum[i] + enter * x;
    const float p = master[i] - lr * (of_gradient * x + of_momentum * b);
    momentum[i] = b;
    master[i] = p;
    STORE(p);
  }
}

using Part = void (*)(void**, int64_t, int64_t, WEIGHT*, const float*);

template <Part part>
static inline __attribute__((always_inline)) void run(void** arrays, WEIGHT* weight, int64_t length, const float* c) {
  int64_t start = 0;
#if defined(HAS_WEIGHT) && defined(__AVX__)
  // The working copy is only written, so it goes past the caches: they would read it from memory first.
  constexpr int64_t block = 512, lane = 32 / sizeof(WEIGHT);
  if ((uintptr_t)weight % 32 == 0) {
    for (; start + block <= length; start += block) {
      alignas(64) WEIGHT copy[block];
      part(arrays, start, start + block, copy, c);
      for (int64_t i = 0; i < block; i += lane)
        _mm256_stream_si256((__m256i*)(weight + start + i), _mm256_load_si256((const __m256i*)(copy + i)));
    }
    _mm_sfence();
  }
#endif
  part(arrays, start, length, weight + start, c);
}

extern "C" void adam(void** arrays, int64_t length, const float* c) {
  run<adam_part>(arrays, (WEIGHT*)arrays[4], length, c);
}

extern "C" void sgd(void** arrays, int64_t length, const float* c) {
  run<sgd_part>(arrays, (WEIGHT*)arrays[2], length, c);
}

extern "C" void sgd_momentum(void** arrays, int64_t length, const float* c) {
  run<sgd_momentum_part>(arrays, (WEIGHT*)arrays[3], length, c);
}
"""

# Without -ffast-math: NaN and infinity must come out as they do in torch. These three only let loops be vectorised.
_FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")

_WIDTH: Final = {False: "-mprefer-vector-width=256", True: "-mprefer-vector-width=512"}
"""By whether there is a working copy: x86 divides faster in halves, and packs narrow numbers faster as a whole."""


def function(name: str, gradient: torch.dtype, weight: torch.dtype | None) -> Function | None:
    """Return a kernel; None where there is no compiler, or none that knows these dtypes.

    Args:
        name: adam, sgd or sgd_momentum.
        gradient: the gradients' dtype.
        weight: the working copy's dtype; None: there is none but the master.
    """
    if gradient not in _TYPES or (weight is not None and weight not in _TYPES):
        return None
    library = _library(_TYPES[gradient], None if weight is None else _TYPES[weight])
    return None if library is None else _bound(library, name)


@functools.cache
def _bound(library: ctypes.CDLL, name: str) -> Function:
    raw = library[name]

    def call(arrays: Sequence[int], length: int, constants: Sequence[float]) -> None:
        pointers = (ctypes.c_void_p * _MOST_ARRAYS)(*arrays)
        raw(pointers, ctypes.c_int64(length), (ctypes.c_float * len(constants))(*constants))

    return call


@functools.cache
def _library(gradient: str, weight: str | None) -> ctypes.CDLL | None:
    """Compile the kernels for one pair of types; not kept on disk, another machine may share the folder."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
    if compiler is None:
        _LOG.warning("no C++ compiler was found (CXX, c++, g++, clang++), so the optimizer's kernels are not compiled")
        return None
    types = [f"-DGRADIENT={gradient}", *(["-DHAS_WEIGHT=1", f"-DWEIGHT={weight}"] if weight is not None else [])]
    for processor in (["-march=native", _WIDTH[weight is not None]], ["-march=native"], ["-mcpu=native"], []):
        library = _compile([compiler, *_FLAGS, *processor, *types])
        if library is not None:
            return library
    _LOG.warning("%s cannot compile the optimizer's kernels for %s", compiler, gradient)
    return None


def _compile(command: list[str]) -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory(prefix="smpkit-") as folder:
        source, target = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text(_SOURCE)
        try:
            subprocess.run(
                [*command, "-o", str(target), str(source)], check=True, capture_output=True, timeout=_SECONDS
            )
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            _LOG.debug("%s: %s", " ".join(command), getattr(error, "stderr", error))
            return None
