#include "core/registry.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "core/device.h"
#include "core/problem.h"
#include "core/status.h"

namespace scaled_mm {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Arch>> archs;
  std::map<std::tuple<std::string, std::string, int32_t>, const Kernel*> kernels; // arch, row, out dtype
  std::vector<std::unique_ptr<Table>> tables;                                     // also replaced ones: descriptors may point into them
  std::vector<std::unique_ptr<AwaitedKernel>> awaited;
  std::atomic<uint64_t> loads{1}; // 1 + the number of libraries loaded so far
  scaledMMKernelProvider_t provider = nullptr;
  void* provider_user = nullptr;
};

// Never destroyed: kernels may be launched during the destruction of static objects.
Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

// The registry's mutex must be held.
const Kernel* registered(const Registry& r, const Arch& arch, const char* row, int32_t out_dtype) {
  auto found = r.kernels.find({arch.name, row, out_dtype});
  return found == r.kernels.end() ? nullptr : found->second;
}

const Kernel* find_kernel(const Arch& arch, const char* row, int32_t out_dtype) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  return registered(r, arch, row, out_dtype);
}

// SUCCESS also without a provider: the caller looks again and reports what is missing. answered: whether there is one.
scaledMMStatus_t ask_provider(const Arch& arch, const char* row, int32_t out_dtype, scaledMMProvide_t when, bool* answered = nullptr) {
  scaledMMKernelProvider_t provider;
  void* user;
  {
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    provider = r.provider;
    user = r.provider_user;
  }
  if (answered) *answered = provider != nullptr;
  if (provider == nullptr) return SCALED_MM_STATUS_SUCCESS;
  const scaledMMStatus_t status = provider(arch.name.c_str(), row, out_dtype, when, user);
  if (status >= SCALED_MM_STATUS_SUCCESS && status <= SCALED_MM_STATUS_CUDA_ERROR) return status;
  return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "kernel provider: expected a scaledMMStatus_t, got %d", int(status));
}

} // namespace

int32_t product_of_table(int32_t number) {
  for (int32_t product = 0; product < kNumProblemKinds; ++product) {
    const TableRules& table = kProblemKinds[product]->table;
    if (table.noun != nullptr && table.number == number) return product;
  }
  return -1;
}

const TableRow* Table::find_row(const char* name) const {
  for (int32_t i = 0; i < num_rows; ++i) {
    if (rows[i].name == name) return &rows[i];
  }
  return nullptr;
}

int32_t Table::find_bucket(int64_t M, int64_t N, int64_t K, int32_t serves) const {
  for (size_t i = 0; i < buckets.size(); ++i) {
    const scaledMMTableBucket_t& b = buckets[i];
    if ((b.flags & ~serves) != 0) continue;
    if (M >= b.m_min && M <= b.m_max && N >= b.n_min && N <= b.n_max && K >= b.k_min && K <= b.k_max) return int32_t(i);
  }
  return -1; // unreachable: scaledMMRegisterTable refuses a table without an open last bucket
}

int32_t Table::find_mode(int64_t tokens) const {
  for (const scaledMMTableMode_t& rule : modes) {
    if (tokens <= rule.m_max) return rule.mode;
  }
  return SCALED_MM_GGUF_AUTO; // unreachable: scaledMMRegisterTable refuses a GGUF table without an open last mode
}

Arch* find_arch(const char* name) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  std::unique_ptr<Arch>& arch = r.archs[name];
  if (!arch) {
    auto made = std::make_unique<Arch>();
    made->name = name;
    arch = std::move(made);
  }
  return arch.get();
}

scaledMMStatus_t require_table(Arch* arch, const Table** table, int32_t product) {
  const auto& slot = arch->tables[product];
  *table = slot.load(std::memory_order_acquire);
  if (*table) return SCALED_MM_STATUS_SUCCESS;
  if (scaledMMStatus_t status = ask_provider(*arch, nullptr, -1, SCALED_MM_PROVIDE_NOW)) return status;
  *table = slot.load(std::memory_order_acquire);
  if (*table) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED,
              "handle: no tile table%s is registered for %s; load kernels built with `scaled-mm build --arch %s`", kProblemKinds[product]->table.noun,
              arch->name.c_str(), arch->name.c_str());
}

namespace {

// Lets the device run a kernel.
scaledMMStatus_t prepare(const Kernel& kernel, int32_t device, int32_t max_shared_memory) {
  if (kernel.shared_memory > max_shared_memory) {
    return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED, "kernel: row %s needs %d bytes of shared memory, device %d lets a block have %d",
                kernel.row, int(kernel.shared_memory), int(device), int(max_shared_memory));
  }
  char message[512] = "";
  if (scaledMMStatus_t status = kernel.prepare(device, message, sizeof(message))) {
    return fail(status, "kernel: row %s cannot run on device %d: %s", kernel.row, int(device), message);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t prepare_slot(KernelSlot* slot, int32_t device, int32_t max_shared_memory) {
  const uint64_t bit = uint64_t(1) << device;
  if (slot->prepared.load(std::memory_order_acquire) & bit) return SCALED_MM_STATUS_SUCCESS;
  if (scaledMMStatus_t status = prepare(*slot->kernel.load(std::memory_order_acquire), device, max_shared_memory)) return status;
  slot->prepared.fetch_or(bit, std::memory_order_release);
  return SCALED_MM_STATUS_SUCCESS;
}

// Gives plans the kernels that they wait for and that are loaded. Called by the thread that has loaded them.
scaledMMStatus_t publish_awaited() {
  Registry& r = registry();
  std::vector<AwaitedKernel*> found;
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    for (const auto& awaited : r.awaited) {
      if (awaited->refused || awaited->ready.load(std::memory_order_relaxed)) continue;
      const Kernel* kernel = registered(r, *awaited->arch, awaited->row, awaited->out_dtype);
      if (kernel == nullptr) continue;
      found.push_back(awaited.get());
      awaited->slot->kernel.store(kernel, std::memory_order_release);
    }
  }
  if (found.empty()) return SCALED_MM_STATUS_SUCCESS;
  const RelaxedCapture another_thread_may_capture;
  scaledMMStatus_t first = SCALED_MM_STATUS_SUCCESS;
  for (AwaitedKernel* awaited : found) {
    const scaledMMStatus_t status = prepare_slot(awaited->slot, awaited->device, awaited->max_shared_memory);
    if (status == SCALED_MM_STATUS_SUCCESS) {
      awaited->ready.store(awaited->slot->kernel.load(std::memory_order_relaxed), std::memory_order_release);
      continue;
    }
    std::lock_guard<std::mutex> lock(r.mutex);
    awaited->refused = true;
    if (first == SCALED_MM_STATUS_SUCCESS) first = status;
  }
  return first;
}

} // namespace

bool is_loaded(const KernelName& name) {
  KernelSlot& slot = *name.slot;
  if (slot.kernel.load(std::memory_order_acquire)) return true;
  const uint64_t loads = registry().loads.load(std::memory_order_acquire);
  if (slot.searched.load(std::memory_order_acquire) == loads) return false;
  const Kernel* kernel = find_kernel(*name.arch, name.row, name.out_dtype);
  if (kernel == nullptr) {
    slot.searched.store(loads, std::memory_order_release);
    return false;
  }
  slot.kernel.store(kernel, std::memory_order_release);
  return true;
}

bool was_asked(const KernelName& name, scaledMMProvide_t when) { return name.slot->asked.load(std::memory_order_acquire) >> when & 1; }

scaledMMStatus_t ask_once(const KernelName& name, scaledMMProvide_t when) {
  if (was_asked(name, when)) return SCALED_MM_STATUS_SUCCESS;
  bool answered = false;
  if (scaledMMStatus_t status = ask_provider(*name.arch, name.row, name.out_dtype, when, &answered)) return status;
  if (answered) name.slot->asked.fetch_or(uint32_t(1) << when, std::memory_order_release);
  return SCALED_MM_STATUS_SUCCESS;
}

const AwaitedKernel* await_kernel(const KernelName& name) {
  const auto of_device = [&name] {
    AwaitedKernel* one = name.slot->awaited.load(std::memory_order_acquire);
    while (one && one->device != name.device) one = one->next;
    return one;
  };
  AwaitedKernel* found = of_device();
  if (found == nullptr) {
    auto made = std::make_unique<AwaitedKernel>();
    made->arch = name.arch;
    made->row = name.row;
    made->out_dtype = name.out_dtype;
    made->device = name.device;
    made->max_shared_memory = name.max_shared_memory;
    made->slot = name.slot;
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    found = of_device();
    if (found == nullptr) {
      made->next = name.slot->awaited.load(std::memory_order_relaxed);
      r.awaited.push_back(std::move(made));
      found = r.awaited.back().get();
      name.slot->awaited.store(found, std::memory_order_release);
    }
  }
  // A library that was loaded before `found` was in the list did not publish it; is_loaded now finds that library.
  return is_loaded(name) ? nullptr : found;
}

scaledMMStatus_t load_now(const KernelName& name) {
  if (is_loaded(name)) return SCALED_MM_STATUS_SUCCESS;
  return ask_provider(*name.arch, name.row, name.out_dtype, SCALED_MM_PROVIDE_NOW);
}

scaledMMStatus_t fail_not_built(const KernelName& name, const char* nor) {
  return fail(SCALED_MM_STATUS_KERNEL_NOT_BUILT,
              "kernel: row %s of %s for %s %s is in no loaded library%s; build it with `scaled-mm build --arch %s` "
              "and load it with scaledMMLoadKernels",
              name.row, name.arch->name.c_str(), name.out_dtype < SCALED_MM_DTYPE_Q4_0 ? "out" : "weights of",
              name.out_dtype < 0 ? "of any dtype" : dtype_name(name.out_dtype), nor, name.arch->name.c_str());
}

scaledMMStatus_t require_kernel(const KernelName& name, const Kernel** kernel) {
  if (scaledMMStatus_t status = load_now(name)) return status;
  if (!is_loaded(name)) return fail_not_built(name);
  *kernel = name.slot->kernel.load(std::memory_order_acquire);
  return prepare_slot(name.slot, name.device, name.max_shared_memory);
}

} // namespace scaled_mm

using namespace scaled_mm;

namespace {

// The most kernel configs, buckets or modes of a table, far above any real table: a wrong count is refused before the arrays are read.
constexpr int64_t kMostEntries = 1 << 16;
// scaledMMHandleInfo_t cannot hold a longer name, so no handle could find the table.
constexpr size_t kMostArchBytes = sizeof(scaledMMHandleInfo_t::arch) - 1;

bool is_alignment(int32_t bytes) { return bytes >= 1 && (bytes & (bytes - 1)) == 0; }

// A table with modes must define AUTO for every number of tokens. Any other table must have none.
scaledMMStatus_t check_modes(const scaledMMTable_t& table, const TableRules& rules) {
  if (!rules.has_modes) {
    if (table.num_modes == 0) return SCALED_MM_STATUS_SUCCESS;
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: expected no modes in a table%s, got %lld", table.source, rules.noun,
                static_cast<long long>(table.num_modes));
  }
  if (table.num_modes < 1 || table.num_modes > kMostEntries || table.modes == nullptr || table.modes[table.num_modes - 1].m_max != INT64_MAX) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: expected modes, the last of them open, got %lld in all", table.source,
                static_cast<long long>(table.num_modes));
  }
  for (int64_t i = 0; i < table.num_modes; ++i) {
    const int32_t mode = table.modes[i].mode;
    if (mode <= SCALED_MM_GGUF_AUTO || mode > SCALED_MM_GGUF_W16A16) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: a mode: expected a scaledMMGgufMode_t but AUTO, got %d", table.source, int(mode));
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace

scaledMMStatus_t scaledMMSetKernelProvider(scaledMMKernelProvider_t provider, void* user) try {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.provider = provider;
  r.provider_user = user;
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMRegisterTable(const scaledMMTable_t* table) try {
  if (table == nullptr || table->arch == nullptr || table->source == nullptr || table->rows == nullptr || table->buckets == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "table: expected arch, source, rows and buckets, got a null pointer");
  }
  const size_t arch_bytes = strlen(table->arch);
  if (arch_bytes < 1 || arch_bytes > kMostArchBytes) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: expected an arch of 1 to %zu bytes, got %.200s", table->source, kMostArchBytes,
                table->arch);
  }
  if (table->num_rows < 1 || table->num_rows > kMostEntries || table->num_buckets < 1 || table->num_buckets > kMostEntries ||
      table->fallback_row < 0 || table->fallback_row >= table->num_rows) {
    return fail(SCALED_MM_STATUS_BAD_PARAM,
                "table %.200s: expected rows, buckets and a fallback among the rows, at most 65536 of each, got %lld, %lld and row %d", table->source,
                static_cast<long long>(table->num_rows), static_cast<long long>(table->num_buckets), int(table->fallback_row));
  }
  const int32_t product = product_of_table(table->kind);
  if (product < 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: expected a kind of scaledMMTableKind_t, got %d", table->source, int(table->kind));
  }
  const TableRules& rules = kProblemKinds[product]->table;
  if (scaledMMStatus_t status = check_modes(*table, rules)) return status;
  auto copy = std::make_unique<Table>();
  copy->arch = table->arch;
  copy->source = table->source;
  copy->tuned = table->tuned != 0;
  copy->num_rows = int32_t(table->num_rows);
  copy->fallback_row = table->fallback_row;
  copy->rows = std::make_unique<TableRow[]>(table->num_rows);
  for (int32_t i = 0; i < copy->num_rows; ++i) {
    const scaledMMTableRow_t& row = table->rows[i];
    if (row.name == nullptr || row.align_a < 1 || row.align_b < 1 || row.align_out < 1 || row.store_bytes < 1) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: row %d: expected a name, and alignments and store_bytes of at least 1", table->source,
                  int(i));
    }
    if (!is_alignment(row.align_a) || !is_alignment(row.align_b) || !is_alignment(row.align_out)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: row %d: expected alignments that are powers of two, got %d, %d and %d", table->source,
                  int(i), int(row.align_a), int(row.align_b), int(row.align_out));
    }
    if (row.block_size < 0) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: row %d: expected a block_size of at least 0, got %d", table->source, int(i),
                  int(row.block_size));
    }
    if (!is_legal(row.time)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM,
                  "table %.200s: row %d: expected a time model with sizes and rates above 0 and finite times, or none; at most 1024 thread blocks",
                  table->source, int(i));
    }
    if (rules.has_modes && row.time.unit_m > 0 && (row.time.most_parts == 0 || row.time.wait_us > 0)) {
      return fail(
          SCALED_MM_STATUS_BAD_PARAM,
          "table %.200s: row %d: expected a time model with most_parts > 0 and wait_us of 0 for a table%s, or none: rows whose last bits differ "
          "must be chosen alike on every GPU",
          table->source, int(i), rules.noun);
    }
    copy->rows[i].name = row.name;
    copy->rows[i].time = row.time;
    copy->rows[i].needs = {row.align_a, row.align_b, row.align_out, row.store_bytes, row.block_size};
  }
  const TableRow& fallback = copy->rows[copy->fallback_row];
  if (fallback.needs.any() || fallback.needs.block_size > 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: the fallback row %.200s must take any alignment and block size", table->source,
                fallback.name.c_str());
  }
  if (table->num_modes > 0) copy->modes.assign(table->modes, table->modes + table->num_modes);
  copy->buckets.assign(table->buckets, table->buckets + table->num_buckets);
  bool timed = false;
  for (int32_t i = 0; i < copy->num_rows; ++i) timed |= i != copy->fallback_row && copy->rows[i].has_time();
  for (const scaledMMTableBucket_t& bucket : copy->buckets) {
    if (bucket.row == SCALED_MM_FASTEST && rules.has_modes && !timed) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: a bucket takes the fastest row, but no row besides the fallback has a time model",
                  table->source);
    }
    if (bucket.row != SCALED_MM_FASTEST && (bucket.row < 0 || bucket.row >= copy->num_rows)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: a bucket names row %d of %d", table->source, int(bucket.row), int(copy->num_rows));
    }
    const int32_t mode = bucket.flags & ~SCALED_MM_BUCKET_MINIMA;
    if ((bucket.flags & ~rules.bucket_flags) != 0 || (mode & (mode - 1)) != 0) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: a bucket: expected flags %s, got %d", table->source, rules.flags_text,
                  int(bucket.flags));
    }
  }
  const scaledMMTableBucket_t& last = copy->buckets.back();
  if (last.m_max != INT64_MAX || last.n_max != INT64_MAX || last.k_max != INT64_MAX || last.m_min > 0 || last.n_min > 0 || last.k_min > 0 ||
      last.flags != 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "table %.200s: the last bucket must be open in M, N and K, to any %s", table->source, rules.open_operand);
  }
  Arch* arch = find_arch(copy->arch.c_str());
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.tables.push_back(std::move(copy)); // before anything finds it: this may throw
  arch->tables[product].store(r.tables.back().get(), std::memory_order_release);
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMLoadKernels(const char* path) try {
  if (path == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "path: expected a kernel library, got a null pointer");
  // dlopen("") would return the running program.
  if (*path == '\0') return fail(SCALED_MM_STATUS_BAD_PARAM, "path: expected a kernel library, got an empty path");
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "path: expected a kernel library, %s", dlerror());
  auto entry = reinterpret_cast<decltype(&scaled_mm_kernel_library)>(dlsym(library, "scaled_mm_kernel_library"));
  const KernelLibrary* content = entry ? entry() : nullptr;
  if (content == nullptr || content->abi_version != SCALED_MM_KERNEL_ABI_VERSION) {
    const int version = content ? int(content->abi_version) : 0;
    dlclose(library);
    return fail(SCALED_MM_STATUS_BAD_PARAM, "path: expected a kernel library of ABI version %d, got %d from %s", SCALED_MM_KERNEL_ABI_VERSION,
                version, path);
  }
  {
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (int64_t i = 0; i < content->num_kernels; ++i) {
      const Kernel* kernel = content->kernels[i];
      // A kernel that is already registered stays, because descriptors may hold it: a kernel config has one meaning per process.
      r.kernels.emplace(std::make_tuple(std::string(content->arch), std::string(kernel->row), kernel->out_dtype), kernel);
    }
    r.loads.fetch_add(1, std::memory_order_release);
  }
  // The library's tables are registered for kinds of product that have none yet.
  for (int64_t i = 0; i < content->num_tables; ++i) {
    const scaledMMTable_t* table = content->tables[i];
    const int32_t product = product_of_table(table->kind);
    if (product < 0 || find_arch(content->arch)->tables[product].load(std::memory_order_acquire) == nullptr) {
      if (scaledMMStatus_t status = scaledMMRegisterTable(table)) return status;
    }
  }
  return publish_awaited(); // the library is never closed: its kernels are registered
} catch (const std::exception& error) {
  return fail_exception(error);
}
