// Compares where cute puts a decode tile's accumulators with what the kernel takes for granted: that the rows which a block of the
// cluster owns are a run of them, laid out as the first block's are, and that together they are the tile. On the host alone.
#include <cstdio>

#include "int8/decode/gemm.cuh"

using namespace cute;

template <int kColumns, int kRows, int kSplit>
int wrong() {
  using Mma = typename scaled_mm::decode::Gemm<kColumns, kRows, kSplit, 1, 2, false, float>::Mma;
  constexpr int kOwners = scaled_mm::decode::owners(kRows, kSplit), kSlice = kRows / kOwners;
  int found = 0;
  bool seen[kColumns][kRows] = {};
  for (int thread = 0; thread < scaled_mm::decode::consumers(kColumns); ++thread) {
    const auto where = Mma{}.get_thread_slice(thread).partition_C(make_identity_tensor(Shape<Int<kColumns>, Int<kRows>>{}));
    const int own = int(size(where)) / kOwners;
    for (int i = 0; i < int(size(where)); ++i) {
      const int n = get<0>(where(i)), m = get<1>(where(i)), first_n = get<0>(where(i % own)), first_m = get<1>(where(i % own));
      found += n != first_n || m != first_m + i / own * kSlice || first_m >= kSlice || seen[n][m];
      seen[n][m] = true;
    }
  }
  for (auto& column : seen)
    for (bool one : column) found += !one;
  return found;
}

int main() {
  printf("%d %d %d %d %d %d %d\n", wrong<64, 8, 4>(), wrong<64, 16, 4>(), wrong<64, 24, 2>(), wrong<64, 96, 8>(), wrong<64, 256, 2>(),
         wrong<128, 64, 1>(), wrong<128, 128, 8>());
}
