// Malformed tensors: one field at a time, random fields, and the largest sizes.
#include "fields.h"
#include "hostile.h"

namespace hostile {

void set_field(scaledMMTensorDesc_t* t, int field, int64_t value) {
  switch (field) {
  case 0: t->dtype = int32_t(value); break;
  case 1: t->ndim = int32_t(value); break;
  case 8: t->alignment = value; break;
  case 9: t->flags = value; break;
  default: (field < 5 ? t->shape[field - 2] : t->strides[field - 5]) = value;
  }
}

// Each field of each tensor of a product takes each of the values. Each tensor is also left out, and each absent one added.
void one_field_at_a_time(scaledMMHandle_t handle, bool on_gpu) {
  Random random(1);
  for (int kind = 0; kind < kKinds; ++kind) {
    for (int sample = 0; sample < 3; ++sample) {
      const Product base = good(random, Kind(kind));
      for (int tensor = 0; tensor < kTensors[kind]; ++tensor) {
        Product p = base;
        p.present[tensor] = !base.present[tensor];
        context = "kind " + std::to_string(kind) + ", tensor " + std::to_string(tensor);
        try_product(handle, on_gpu, p, base, random);
        if (p.present[tensor]) continue;
        for (int field = 0; field < kFields; ++field) {
          for (int64_t value : kValues) {
            context = "kind " + std::to_string(kind) + ", tensor " + std::to_string(tensor) + ", field " + std::to_string(field) + " = " +
                      std::to_string(value);
            p = base;
            set_field(&p.tensors[tensor], field, value);
            try_product(handle, on_gpu, p, base, random);
          }
        }
      }
    }
  }
}

void random_fields(scaledMMHandle_t handle, bool on_gpu, uint64_t seed, int rounds) {
  Random random(seed);
  const std::string long_name(100000, 'k');
  for (int round = 0; round < rounds; ++round) {
    context = "seed " + std::to_string(seed) + ", round " + std::to_string(round);
    const Kind kind = Kind(below(random, kKinds));
    const Product base = good(random, kind);
    Product p = base;
    for (int64_t changes = below(random, 4); changes > 0; --changes) {
      const int tensor = int(below(random, kTensors[kind]));
      set_field(&p.tensors[tensor], int(below(random, kFields)), below(random, 8) ? pick(random, kValues) : int64_t(random()));
      if (below(random, 16) == 0) p.present[tensor] = !p.present[tensor];
    }
    if (below(random, 4) == 0) p.mode = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) p.kernel = pick(random, {"any", "fast", "split", "blocks", "", "\xff\xfe", "caf\xc3\xa9", "%s%n", long_name.c_str()});
    try_product(handle, on_gpu, p, base, random);
  }
}

// The largest valid sizes; GGUF products have strides of 0. No computation may overflow.
void broadcast_giants(scaledMMHandle_t handle, bool on_gpu) {
  context = "giants";
  Random random(2);
  const int64_t most = INT32_MAX / 32 * 32;
  for (int32_t activation : {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_Q8_1}) {
    Product p = {kGguf, {}, {}};
    put(&p, 0, {kFloat, 2, {1, most, -1}, {most, 1, -1}, 16, 0});
    put(&p, 1, {SCALED_MM_DTYPE_Q4_0, 2, {1, most, -1}, {0, 1, -1}, 16, 0});
    put(&p, 2, {activation, 2, {most, most, -1}, {0, activation == SCALED_MM_DTYPE_Q8_1, -1}, 16, 0});
    try_product(handle, on_gpu, p, p, random);
    put(&p, 1, {SCALED_MM_DTYPE_Q8_0, 2, {most, most, -1}, {0, 1, -1}, 16, SCALED_MM_TENSOR_PACKED});
    put(&p, 0, {kFloat, 2, {most, 1, -1}, {1, 1, -1}, 16, 0});
    p.tensors[2].shape[0] = 1;
    try_product(handle, on_gpu, p, p, random);
  }
  Product p = {kGemm, {}, {}};
  put(&p, 0, matrix(kFloat, 1 << 30, 1 << 30));
  put(&p, 1, matrix(kInt8, 1 << 30, 16));
  put(&p, 2, matrix(kInt8, 16, 1 << 30, false));
  put(&p, 3, vector(kFloat, 1));
  put(&p, 4, vector(kFloat, 1));
  try_product(handle, on_gpu, p, p, random);
  p.kernel = on_gpu ? "split" : nullptr; // a row that asks for eight bytes for each element of out
  void* d = nullptr;
  if (on_gpu) EXPECT_MESSAGE(create(handle, &d, p), BAD_TENSOR_SHAPE, "kernel: row split has a workspace for at most 2^48 elements");
}

} // namespace hostile
