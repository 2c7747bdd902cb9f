"""The optimizers' kernels in C++, compiled when first needed.

They read each array from memory once. The compiler that torch would use (`CXX`, else c++, g++ or clang++) needs a
fraction of a second, and compiles for the processor it runs on. ctypes calls release the GIL; kernels of torch.compile
hold it, and took 1.4 times as long (benchmarks/offload_model).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from smpkit import compilers

__all__ = ["Function", "function"]

Function = Callable[[Sequence[int], int, Sequence[float]], None]
"""Takes the arrays' addresses (gradient, master, state..., working copy), their length, and the rule's constants."""

_LOG: Final = logging.getLogger(__name__)
_SECONDS: Final = 60.0
_MOST_ARRAYS: Final = 5

_TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
}
"""Not float16: compilers convert it one number at a time, and torch's own kernels are up to 1.7 times as fast."""

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

#ifndef HAS_WEIGHT
#define WEIGHT float
#endif

// Elements from one pass over memory to its next, or to the copy of its result: they still lie in the first cache.
constexpr int64_t block = 512;

// One step of `length` elements, a block or less, from `start`.
#define RULE(name) \
  static inline __attribute__((always_inline)) void name##_part( \
      void** arrays, int64_t start, int64_t length, const float* c)
#define ARRAY(type, number) ((type*)arrays[number] + start)
// `l2` is 0 for most: the compiler makes loops of their own for them.
#define WITH_L2(i) (l2 != 0 ? (float)gradient[i] * factor + l2 * master[i] : (float)gradient[i] * factor)

RULE(adam) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  float* __restrict first = ARRAY(float, 2);
  float* __restrict second = ARRAY(float, 3);
  const float enter1 = 1 - c[0], beta2 = c[1], enter2 = 1 - c[1], eps = c[2], decay = c[3], l2 = c[4], size = c[5];
  const float correction = 1 / c[6], factor = c[7];  // a product for each element, where torch divides twice
  // In two halves: from a gradient to its weight is one long chain with a root and a division in it, and what waits
  // in such chains fills the processor's queue until it no longer reads ahead.
  float divisor[block];
  for (int64_t i = 0; i < length; i++) {
    const float x = WITH_L2(i);
    const float m = first[i] + enter1 * (x - first[i]);
    const float v = second[i] * beta2 + enter2 * x * x;
    first[i] = m;
    second[i] = v;
    divisor[i] = std::sqrt(v) * correction + eps;
  }
  for (int64_t i = 0; i < length; i++) master[i] = master[i] * decay - size * (first[i] / divisor[i]);
}

RULE(sgd) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  const float lr = c[0], l2 = c[1], factor = c[6];
  for (int64_t i = 0; i < length; i++) master[i] -= lr * WITH_L2(i);
}

RULE(sgd_momentum) {
  const GRADIENT* __restrict gradient = ARRAY(const GRADIENT, 0);
  float* __restrict master = ARRAY(float, 1);
  float* __restrict momentum = ARRAY(float, 2);
  const float lr = c[0], l2 = c[1], keep = c[2], enter = c[3], of_gradient = c[4], of_momentum = c[5], factor = c[6];
  for (int64_t i = 0; i < length; i++) {
    const float x = WITH_L2(i);
    const float b = keep * momentum[i] + enter * x;
    momentum[i] = b;
    master[i] -= lr * (of_gradient * x + of_momentum * b);
  }
}

#ifdef __AVX__
// Write 32 bytes of the working copy past the caches: it is only written, and they would read it from memory first.
template <class T>
static inline void stream(T* weight, const float* master) {
  constexpr int64_t lane = 32 / sizeof(T);
  alignas(32) T copy[lane];
  for (int64_t i = 0; i < lane; i++) copy[i] = master[i];
  _mm256_stream_si256((__m256i*)weight, _mm256_load_si256((const __m256i*)copy));
}
#endif

#ifdef __AVX2__
// As BFloat16's assignment, eight at once: the low half of each number is left. Compilers take half as much again.
static inline __m256i rounded(const float* master) {
  const __m256 value = _mm256_loadu_ps(master);
  const __m256i wide = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
}

static inline void stream(BFloat16* weight, const float* master) {
  const __m256i packed = _mm256_packus_epi32(rounded(master), rounded(master + 8));  // within each half
  _mm256_stream_si256((__m256i*)weight, _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}
#endif

static inline __attribute__((always_inline)) void narrow(
    WEIGHT* __restrict weight, const float* __restrict master, int64_t length) {
  int64_t i = 0;
#ifdef __AVX__
  constexpr int64_t lane = 32 / sizeof(WEIGHT);
  if ((uintptr_t)weight % 32 == 0)
    for (; i + lane <= length; i += lane) stream(weight + i, master + i);
#endif
  for (; i < length; i++) weight[i] = master[i];
}

using Part = void (*)(void**, int64_t, int64_t, const float*);

template <Part part>
static inline __attribute__((always_inline)) void run(void** arrays, WEIGHT* weight, int64_t length, const float* c) {
  for (int64_t start = 0; start < length; start += block) {
    const int64_t now = length - start < block ? length - start : block;
    part(arrays, start, now, c);
#ifdef HAS_WEIGHT
    narrow(weight + start, (const float*)arrays[1] + start, now);
#endif
  }
#if defined(HAS_WEIGHT) && defined(__AVX__)
  _mm_sfence();
#endif
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

_NATIVE: Final[tuple[list[str], ...]] = (
    ["-march=native", "-mprefer-vector-width=256"],
    ["-march=native"],
    ["-mcpu=native"],
    [],
)
"""Options for this processor, tried in order; vectors of 256 bits, because x86 divides no faster in longer ones."""


def function(name: str, gradient: torch.dtype, weight: torch.dtype | None) -> Function | None:
    """Return a kernel; None if there is no compiler, or none that supports these dtypes.

    Args:
        name: adam, sgd or sgd_momentum.
        gradient: the gradients' dtype.
        weight: the working copy's dtype; None: there is no working copy besides the master.
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
    """Compile the kernels for one pair of types."""
    # Not cached on disk: another machine, with another processor, may share the folder.
    compiler = compilers.find_compiler()
    if compiler is None:
        _LOG.warning("no C++ compiler was found (%s), so the optimizer's kernels are not compiled", compilers.NAMES)
        return None
    types = [f"-DGRADIENT={gradient}", *(["-DHAS_WEIGHT=1", f"-DWEIGHT={weight}"] if weight is not None else [])]
    for processor in _NATIVE:
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
