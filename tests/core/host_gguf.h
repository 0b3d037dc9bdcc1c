// GGUF products by plain loops over host memory, for the fake driver's device (see host_kernels.cpp): blocks and tiles are read byte by
// byte as docs/design/gguf-formats.md says, and sums are doubles. Float activations in mode w4a8 go through the workspace, all of which is spoilt.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/kernel_abi.h"

extern "C" void* host_kernels_last_stream;
extern "C" bool host_kernels_last_constant_b;

namespace host_gguf {

using scaled_mm::BlockOperands;
using scaled_mm::GemmLaunch;

inline float half_at(const uint8_t* p) {
  _Float16 value;
  memcpy(&value, p, 2);
  return float(value);
}

inline float bfloat_at(const void* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float float_at(const void* data, int64_t index, int32_t dtype) {
  if (dtype == SCALED_MM_DTYPE_FLOAT32) return static_cast<const float*>(data)[index];
  const auto* p = static_cast<const uint8_t*>(data) + 2 * index;
  return dtype == SCALED_MM_DTYPE_FLOAT16 ? half_at(p) : bfloat_at(p);
}

struct Block {
  int level[32];
  double d, second; // second: m, s or 0
};

struct Layout {
  int bits, zero, bytes;
  bool second;
};

inline Layout layout_of(int32_t format) {
  switch (format) {
#define LAYOUT(NAME, name, code, bytes, bits, zero, minimum)                                                                                         \
  case code: return {bits, zero, bytes, minimum};
    SCALED_MM_GGUF_WEIGHT_FORMATS(LAYOUT)
#undef LAYOUT
  default: return {8, 0, 36, true}; // q8_1
  }
}

inline Block read_block(const uint8_t* p, int32_t format) {
  const Layout f = layout_of(format);
  Block block = {{}, half_at(p), f.second ? half_at(p + 2) : 0};
  p += f.second ? 4 : 2;
  const uint8_t* high = p;
  if (f.bits == 5) p += 4;
  for (int e = 0; e < 32; ++e) {
    if (f.bits == 8)
      block.level[e] = int8_t(p[e]);
    else
      block.level[e] = e < 16 ? p[e] & 15 : p[e - 16] >> 4;
    if (f.bits == 5) block.level[e] |= (high[e / 8] >> (e % 8) & 1) << 4;
  }
  return block;
}

inline uint32_t word_at(const uint8_t* p) { return p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24; }

// Level o of pair n of the 16 in five words, at words and last: three fields of five bits in a half, pair 15 in the halves' last bits.
inline int five_bits(const uint8_t* words, const uint8_t* last, int n, int o) {
  const auto half = [&](int i) { return int(word_at(i < 4 ? words + 4 * i : last) >> 16 * o & 0xffff); };
  if (n < 15) return half(n / 3) >> n % 3 * 5 & 31;
  int level = 0;
  for (int i = 0; i < 5; ++i) level |= half(i) >> 15 << i;
  return level;
}

// Block b of row r of a tile.
inline Block read_tile(const uint8_t* tile, int r, int b, int32_t format) {
  const Layout f = layout_of(format);
  const int h = r / 8 % 2, g = r % 8, pair = b / 2, c = 2 * (b % 2) + h;
  const uint8_t* band = tile + r / 16 * 128 * f.bytes;
  Block block = {};
  for (int t = 0; t < 4; ++t) {
    const int i = 4 * g + t;
    const int element[8] = {2 * t, 2 * t + 8, 2 * t + 16, 2 * t + 24, 2 * t + 1, 2 * t + 9, 2 * t + 17, 2 * t + 25};
    for (int j = 0; j < 8; ++j) {
      if (f.bits == 8) {
        constexpr int kByte[8] = {0, 4, 1, 5, 2, 6, 3, 7}; // of the row's two words
        block.level[element[j]] = int8_t(band[b * 512 + i * 16 + 8 * h + kByte[j]]);
        continue;
      }
      const uint8_t* words = band + pair * 512 + i * 16;
      block.level[element[j]] =
          f.bits == 5 ? five_bits(words, band + 2048 + pair * 128 + i * 4, 4 * c + j % 4, j / 4) : int(word_at(words + 4 * c) >> 4 * j & 15);
    }
  }
  const int at = 128 * f.bytes - (f.second ? 512 : 256) + (g * 8 + b) * 4 + 2 * h;
  block.d = half_at(band + at);
  if (f.second) block.second = half_at(band + at + 256);
  return block;
}

inline Block weight_block(const GemmLaunch& l, int64_t n, int64_t b) {
  const int32_t format = l.blocks->format;
  const auto* bytes = static_cast<const uint8_t*>(l.b);
  if (!l.blocks->packed) return read_block(bytes + n * l.b_stride_n + b * l.b_stride_k, format);
  const int64_t columns = (l.K / 32 + 7) / 8;
  return read_tile(bytes + (n / 64 * columns + b / 8) * (512 * layout_of(format).bytes + 128), int(n % 64), int(b % 8), format);
}

// q8_1, as docs/design/gguf-formats.md quantizes to it.
inline void quantize(const float (&x)[32], uint8_t* block) {
  float largest = 0, sums[32];
  for (int e = 0; e < 32; ++e) largest = std::fmax(largest, std::fabs(x[e]));
  memcpy(sums, x, sizeof(sums));
  for (int half = 16; half; half /= 2) {
    for (int e = 0; e < half; ++e) sums[e] = sums[e] + sums[e + half];
  }
  const float d = largest / 127, inverse = d ? 1 / d : 0;
  const _Float16 stored[2] = {_Float16(d), _Float16(sums[0])};
  memcpy(block, stored, 4);
  for (int e = 0; e < 32; ++e) block[4 + e] = uint8_t(int8_t(std::round(x[e] * inverse)));
}

inline int64_t workspace_size(int64_t M, int64_t, int64_t K, const BlockOperands& blocks, int32_t) {
  return blocks.quantize ? M * (K / 32) * 36 + 20 : 0;
}

// One activation's part of a block: with its sum and scale as stored, or floats.
inline double block_product(const Block& w, const Layout& f, const uint8_t* q8_1, const double* floats) {
  double sum = 0;
  if (q8_1) {
    const Block a = read_block(q8_1, SCALED_MM_DTYPE_Q8_1);
    for (int e = 0; e < 32; ++e) sum += double(w.level[e]) * a.level[e];
    const double offset = f.zero ? -f.zero * w.d : w.second;
    return w.d * a.d * sum + offset * a.second;
  }
  for (int e = 0; e < 32; ++e) sum += (w.d * (w.level[e] - f.zero) + w.second) * floats[e];
  return sum;
}

inline void store(void* out, int64_t index, int32_t dtype, float value) {
  if (dtype == SCALED_MM_DTYPE_FLOAT32) {
    static_cast<float*>(out)[index] = value;
  } else if (dtype == SCALED_MM_DTYPE_FLOAT16) {
    const _Float16 half = _Float16(value);
    memcpy(static_cast<uint8_t*>(out) + 2 * index, &half, 2);
  } else {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(out)[index] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

template <int kFormat>
scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
  host_kernels_last_stream = l.stream;
  host_kernels_last_constant_b = l.constant_b;
  const BlockOperands* blocks = l.blocks;
  const bool q8_1 = blocks && blocks->activation == SCALED_MM_DTYPE_Q8_1;
  const int64_t count = l.K / 32, needed = blocks ? workspace_size(l.M, l.N, l.K, *blocks, l.multiprocessors) : 0;
  if (blocks == nullptr || blocks->format != kFormat || l.batch != 1 || (q8_1 && (blocks->quantize || l.a_stride_k != 36)) ||
      (needed && (l.workspace == nullptr || reinterpret_cast<uintptr_t>(l.workspace) % 16)) || l.K % 32) {
    snprintf(message, size, "handed what a GGUF row cannot take");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  if (needed) memset(l.workspace, 0xff, size_t(needed));
  const Layout f = layout_of(kFormat);
  std::vector<double> row(size_t(l.K));
  for (int64_t m = 0; m < l.M; ++m) {
    const auto* quantized = q8_1 ? static_cast<const uint8_t*>(l.a) + m * l.a_stride_m : nullptr;
    auto* made = static_cast<uint8_t*>(l.workspace) + m * count * 36;
    for (int64_t b = 0; !q8_1 && b < count; ++b) {
      float x[32];
      for (int e = 0; e < 32; ++e) {
        x[e] = float_at(l.a, m * l.a_stride_m + (b * 32 + e) * l.a_stride_k, blocks->activation);
        row[size_t(b * 32 + e)] = x[e];
      }
      if (blocks->quantize) quantize(x, made + b * 36);
    }
    if (blocks->quantize) quantized = made;
    for (int64_t n = 0; n < l.N; ++n) {
      double sum = 0;
      for (int64_t b = 0; b < count; ++b) {
        sum += block_product(weight_block(l, n, b), f, quantized ? quantized + b * 36 : nullptr, row.data() + b * 32);
      }
      float value = float(sum);
      if (l.bias) value = value + float_at(l.bias, n * l.bias_stride, l.bias_dtype);
      store(l.out, m * l.out_stride_m + n * l.out_stride_n, blocks->out_dtype, value);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace host_gguf

#define HOST_BLOCK_KERNEL(symbol, row, format)                                                                                                       \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row,     SCALED_MM_DTYPE_##format,  1024, &prepare, &host_gguf::launch<SCALED_MM_DTYPE_##format>, nullptr,       \
                                    nullptr, &host_gguf::workspace_size};
