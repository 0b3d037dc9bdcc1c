// Selects the kernel config of a plan and keeps the reason. Base class of the descriptor.
#pragma once

#include <mutex>
#include <string>

#include "core/registry.h"
#include "core/status.h"

namespace scaled_mm {

struct RowChoice {
  const Table* table = nullptr; // nullptr: the device is a CPU
  const TableRow* row = nullptr;
  const TableRow* bucket_row = nullptr;
  int32_t bucket = -1;          // -1: the kernel config was forced by name
  const char* misfit = nullptr; // why the bucket's kernel config was not used
  RowNeeds needs;               // of `row`

  // Selects the kernel config named `forced`; without a name that of the bucket of (M, N, K), or the fallback if it cannot take the product.
  // kind: for messages, "" or "grouped ". serves: see BucketKey. misfit_of(needs): why a kernel config with these needs cannot take the
  // product, nullptr if it can.
  template <class MisfitOf>
  scaledMMStatus_t choose(const char* forced, const char* kind, int64_t M, int64_t N, int64_t K, int32_t serves, const MisfitOf& misfit_of) {
    if (forced != nullptr) {
      row = table->find_row(forced);
      if (row == nullptr) {
        return fail(SCALED_MM_STATUS_KERNEL_NOT_FOUND, "kernel: expected a %srow of %s (%s), got %s", kind, table->arch.c_str(),
                    table->source.c_str(), forced);
      }
      if (const char* why = misfit_of(row->needs)) {
        return fail(SCALED_MM_STATUS_BAD_PARAM, "kernel: row %s cannot take this product: %s", forced, why);
      }
    } else {
      bucket = table->find_bucket(M, N, K, serves);
      bucket_row = &table->rows[table->buckets[bucket].row];
      misfit = misfit_of(bucket_row->needs);
      row = misfit ? &table->rows[table->fallback_row] : bucket_row;
    }
    needs = row->needs;
    return SCALED_MM_STATUS_SUCCESS;
  }

  // The strings live as long as the plan. kind: for messages, with the mode.
  void describe(const std::string& kind, scaledMMKernelChoice_t* choice) {
    std::call_once(reason_once_, [&] {
      if (row == nullptr) {
        reason_ = "the device is a CPU";
      } else if (bucket < 0) {
        reason_ = "forced by name, from " + table->source;
      } else {
        reason_ = kind + ("bucket " + std::to_string(bucket)) + " of " + table->source + (table->tuned ? " (tuned)" : "");
        if (misfit) reason_ += "; its row " + bucket_row->name + " cannot take this product (" + misfit + "), so the fallback row runs";
      }
    });
    choice->row = row ? row->name.c_str() : "cpu";
    choice->reason = reason_.c_str();
    choice->bucket = bucket;
    choice->tuned = table && table->tuned;
  }

private:
  std::once_flag reason_once_;
  std::string reason_; // written on demand
};

} // namespace scaled_mm
