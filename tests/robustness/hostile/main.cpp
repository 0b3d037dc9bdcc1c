// The sections, in the order in which they run.
#include "hostile.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

using namespace hostile;

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return fprintf(stderr, "usage: hostile_core KERNELS ROUNDS [SECTION]\n"), 2;
  const int rounds = atoi(argv[2]);
  scaledMMHandle_t cpu = nullptr, gpu = nullptr;
  void* d = nullptr;
  EXPECT(scaledMMCreateHandle(&cpu, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  EXPECT(scaledMMCreateHandle(&gpu, SCALED_MM_DEVICE_CUDA, 0, nullptr), SUCCESS);
  EXPECT(create(gpu, &d, plain(kGemm)), ARCHITECTURE_NOT_SUPPORTED);
  EXPECT(scaledMMLoadKernels(argv[1]), SUCCESS);
  const std::pair<const char*, std::function<void()>> sections[] = {
      {"providers", [] { providers(); }},
      {"tables", [] { tables(); }},
      {"null", [&] { null_pointers(cpu); }},
      {"objects", [] { wrong_objects(); }},
      {"names", [&] { names_and_numbers(cpu, gpu, argv[0]); }},
      {"messages", [&] { misaligned_out(cpu), unknown_out_dtype(cpu); }},
      {"giants", [&] { broadcast_giants(cpu, false), broadcast_giants(gpu, true); }},
      {"fields", [&] { one_field_at_a_time(cpu, false), one_field_at_a_time(gpu, true); }},
      {"random",
       [&] {
         for (uint64_t seed : {11, 12, 13}) random_fields(cpu, false, seed, rounds), random_fields(gpu, true, seed, rounds);
         for (const std::atomic<long>& count : launches) REQUIRE(count > rounds / 50);
       }},
      {"rowwise", [&] { rowwise(cpu, false, rounds), rowwise(gpu, true, rounds); }},
      {"memory", [&] { no_host_memory(cpu, gpu, argv[1]); }},
      {"threads", [&] { all_at_once(argv[1], rounds / 20); }},
  };
  for (const auto& [name, run] : sections) {
    if (argc == 3 || strcmp(argv[3], name) == 0) run();
  }
  EXPECT(scaledMMDestroyHandle(cpu), SUCCESS);
  EXPECT(scaledMMDestroyHandle(gpu), SUCCESS);
  if (failures == 0) printf("hostile_core: %ld calls, everything held\n", calls.load());
  return failures != 0;
}
