#include "core/arch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/status.h"

namespace scaled_mm {
namespace {

// The table of compute capability `from` and newer, up to the next entry. GPUs newer than the last entry run its kernels through PTX. `only`: the
// kernels run on this compute capability alone. The tables contain the same lists (`serves`), but a handle is created before a table is registered;
// tests/core/test_core_fake_gpu.py compares the two.
struct Served {
  int32_t from;
  const char* table;
  bool only;
};
constexpr Served kServed[] = {
    {75, "sm75", false}, {80, "sm80", false}, {86, "sm89", false},   {87, "sm80", false},
    {88, "sm89", false}, {90, "sm90", true},  {100, "sm100", false}, {120, "sm120", false},
};

const Served* find_served(int32_t compute_capability) {
  const Served* found = nullptr;
  for (const Served& entry : kServed) {
    if (entry.from == compute_capability || (entry.from < compute_capability && !entry.only)) found = &entry;
  }
  return found;
}

// The oldest compute capability that a table's kernels are compiled for.
const Served& oldest_of(const Served& served) {
  for (const Served& entry : kServed) {
    if (strcmp(entry.table, served.table) == 0) return entry;
  }
  return served;
}

// 80 for "sm80"; 0 for a name that is not of this form and can only be the name of a registered table.
int32_t capability_of(const char* name) {
  if (strncmp(name, "sm", 2) != 0 || name[2] < '1' || name[2] > '9') return 0;
  char* end = nullptr;
  const long value = strtol(name + 2, &end, 10);
  return *end == '\0' && value < 1000 ? int32_t(value) : 0;
}

} // namespace

scaledMMStatus_t choose_arch(const char* forced, int32_t device_id, const DeviceProperties& device, char* name, size_t size) {
  const int32_t have = device.compute_capability;
  const Served* served = find_served(have);
  if (served == nullptr) {
    return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED, "device: expected compute capability 7.5 (Turing) or newer, got %d.%d on device %d",
                have / 10, have % 10, int(device_id));
  }
  const char* origin = "arch";
  if (forced == nullptr) {
    origin = "SCALED_MM_ARCH";
    forced = getenv(origin);
    if (forced != nullptr && *forced == '\0') forced = nullptr;
  }
  const char* table = served->table;
  if (forced != nullptr) {
    table = forced;
    if (const int32_t wanted = capability_of(forced)) {
      served = find_served(wanted);
      if (served == nullptr) {
        return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED, "%s: expected sm75 or newer, got %s", origin, forced);
      }
      const int32_t oldest = oldest_of(*served).from;
      if (oldest > have || (served->only && oldest != have)) {
        return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED,
                    "%s: expected an architecture whose kernels device %d of compute capability %d.%d can run, got %s, which needs %d.%d%s", origin,
                    int(device_id), have / 10, have % 10, forced, oldest / 10, oldest % 10, served->only ? " and no other" : " or newer");
      }
      table = served->table;
    }
  }
  const int written = snprintf(name, size, "%s", table);
  if (written < 1 || written >= int(size)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected the name of a tile table such as sm90, got %s", origin, table);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm
