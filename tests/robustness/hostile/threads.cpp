// Eight threads at once, with shared descriptors and with their own.
#include "tables.h"

#include <thread>
#include <vector>

namespace hostile {

namespace {

constexpr int kThreads = 8;

template <class Work>
void in_threads(const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

} // namespace

void all_at_once(const char* kernels, int rounds) {
  static void* shared[kKinds];
  static std::atomic<int> destroyed[kKinds];
  scaledMMHandle_t gpu = nullptr;
  EXPECT(scaledMMCreateHandle(&gpu, SCALED_MM_DEVICE_CUDA, 0, nullptr), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT(create(gpu, &shared[kind], plain(Kind(kind))), SUCCESS);
  in_threads([&](int number) {
    Random random(uint64_t(100 + number));
    for (int round = 0; round < rounds; ++round) {
      context = "thread " + std::to_string(number) + ", round " + std::to_string(round);
      scaledMMHandle_t handle = nullptr;
      const bool on_gpu = below(random, 2);
      EXPECT(scaledMMCreateHandle(&handle, on_gpu ? SCALED_MM_DEVICE_CUDA : SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
      const Kind kind = Kind(below(random, kKinds));
      const Product p = good(random, kind);
      try_product(handle, on_gpu, p, plain(kind), random);
      const std::string own = "handle: of " + context;
      scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, own.c_str());
      use(plain(kind), shared[kind], true, p, random); // several threads use one descriptor
      scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, own.c_str());
      std::this_thread::yield();
      REQUIRE(own == scaledMMGetLastErrorMessage());
      if (round % 8 == 0) {
        Table t;
        if (below(random, 2)) t.of_gguf();
        EXPECT(scaledMMRegisterTable(&t.table), SUCCESS);
        EXPECT(scaledMMLoadKernels(kernels), SUCCESS);
        EXPECT(scaledMMLoadKernels("/no/such/library.so"), BAD_PARAM);
        EXPECT(scaledMMSetKernelProvider(below(random, 2) ? provider : nullptr, nullptr), SUCCESS);
      }
      EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
    }
  });
  in_threads([&](int) {
    for (int kind = 0; kind < kKinds; ++kind) destroyed[kind] += destroy(shared[kind]) == SCALED_MM_STATUS_SUCCESS;
  });
  context = "eight threads destroy one descriptor";
  for (std::atomic<int>& count : destroyed) REQUIRE(count == 1);
  EXPECT(scaledMMDestroyHandle(gpu), SUCCESS);
}

} // namespace hostile
