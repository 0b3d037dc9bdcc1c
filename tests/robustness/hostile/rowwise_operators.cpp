// Row-wise operators. Not named rowwise.cpp, because the core has a rowwise.cpp, and the objects of both are written to one folder.
#include "fields.h"
#include "hostile.h"

namespace hostile {

namespace {

constexpr int32_t kRowwiseProducts[] = {SCALED_MM_ROWWISE_QUANTIZE, SCALED_MM_ROWWISE_NORM, SCALED_MM_ROWWISE_ACTIVATION};
constexpr int kRowwiseKinds = std::size(kRowwiseProducts);

} // namespace

// Valid calls, and calls with a changed operand, function, output or epsilon. hostile_kernels.cpp has no kernels for them.
void rowwise(scaledMMHandle_t handle, bool on_gpu, int rounds) {
  constexpr int kOperands[] = {9, 8, 6}, kBytes = 1 << 16;
  alignas(16) static char memory[kBytes];
  Random random(7);
  int made[kRowwiseKinds] = {};
  for (int round = 0; round < rounds; ++round) {
    context = "row-wise, round " + std::to_string(round);
    const int kind = int(below(random, kRowwiseKinds)), product = kRowwiseProducts[kind];
    int32_t function = int32_t(kind == 0 ? 0 : kind == 1 ? 1 + below(random, 2) : 3 + below(random, 3));
    int32_t output = int32_t(kind == 0 ? 1 + below(random, 4) : below(random, 2) ? SCALED_MM_ROWWISE_STATIC : below(random, 2));
    double epsilon = kind == 1 ? 1e-6 : 0;
    const int64_t M = pick(random, {0, 1, 5}), N = pick(random, {0, 1, 8, 33});
    const int32_t x = pick(random, {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32});
    const auto of_kind = [&](std::initializer_list<int> places) { return places.begin()[kind]; };
    scaledMMTensorDesc_t t[SCALED_MM_MAX_OPERANDS];
    bool present[SCALED_MM_MAX_OPERANDS] = {};
    const auto place = [&](int i, const scaledMMTensorDesc_t& desc) {
      t[i] = desc;
      present[i] = true;
    };
    for (scaledMMTensorDesc_t& one : t) one = vector(kFloat, 1);
    place(0, matrix(output == SCALED_MM_ROWWISE_CAST ? x : kInt8, M, N, below(random, 2), 3));
    place(1, matrix(x, M, kind == 2 ? 2 * N : N, below(random, 2), 1));
    if (kind == 1) place(3, vector(x, N));
    if (kind == 2 && below(random, 2)) place(5, vector(kInt32, pick(random, {1, 3})));
    if (function == SCALED_MM_ADD_RMS_NORM) place(2, matrix(x, M, N)), place(7, t[1]);
    if (kind == 0 && below(random, 2)) place(2, vector(x, N)), place(3, vector(x, N));
    if (output == SCALED_MM_ROWWISE_STATIC) place(of_kind({4, 4, 2}), vector(kFloat, M)), place(of_kind({5, 5, 3}), vector(kInt32, 1));
    if (output == SCALED_MM_ROWWISE_TOKEN || output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC) place(of_kind({6, 6, 4}), vector(kFloat, M));
    if (output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC) place(7, vector(kInt32, M)), place(8, vector(kInt32, M));
    for (int64_t changes = below(random, 3); changes > 0; --changes) {
      const int i = int(below(random, kOperands[kind]));
      set_field(&t[i], int(below(random, kFields)), below(random, 8) ? pick(random, kValues) : int64_t(random()));
      if (below(random, 8) == 0) present[i] = !present[i];
    }
    if (below(random, 16) == 0) function = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) output = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) epsilon = pick(random, {-1.0, 0.0, 1e300, 1.0 / 0.0, 0.0 / 0.0});
    const scaledMMTensorDesc_t* descs[SCALED_MM_MAX_OPERANDS] = {};
    for (int i = 0; i < kOperands[kind]; ++i) descs[i] = present[i] ? &t[i] : nullptr;
    auto d = reinterpret_cast<scaledMMDescriptor_t>(1);
    const scaledMMStatus_t status = CALL(scaledMMCreateRowwiseDescriptor(handle, &d, product, function, output, epsilon, descs, kOperands[kind]));
    auto none = reinterpret_cast<scaledMMDescriptor_t>(1);
    EXPECT_MESSAGE(scaledMMCreateRowwiseDescriptor(handle, &none, kProducts[kind], 0, 0, 0, descs, kOperands[kind]), BAD_PARAM,
                   "product: expected a row-wise");
    EXPECT_MESSAGE(scaledMMCreateDescriptor(handle, &none, product, descs, kOperands[kind], function, nullptr), BAD_PARAM, "CreateRowwiseDescriptor");
    REQUIRE(none == nullptr && (d == nullptr) == (status != SCALED_MM_STATUS_SUCCESS));
    if (d == nullptr) continue;
    ++made[kind];
    EXPECT(scaledMMCheckTensors(d, product, descs, kOperands[kind]), SUCCESS);
    const void* pointers[SCALED_MM_MAX_OPERANDS] = {};
    for (int i = 0; i < kOperands[kind]; ++i) {
      if (present[i] || below(random, 16) == 0) pointers[i] = below(random, 16) ? memory + below(random, kBytes) / 16 * 16 : nullptr;
    }
    const scaledMMStatus_t calculated = CALL(scaledMMCalculate(d, product, nullptr, 0, pointers, kOperands[kind], nullptr));
    REQUIRE((calculated == SCALED_MM_STATUS_SUCCESS) <= on_gpu); // on a GPU, where there are no kernels, only empty products have a descriptor
    EXPECT(scaledMMDestroyDescriptor(d), SUCCESS);
  }
  for (int of_kind : made) REQUIRE(of_kind > rounds / 60);
}

} // namespace hostile
