// Selects the kernel config of a plan and keeps the reason. Base class of the descriptor.
#pragma once

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <string>

#include "core/decisions.h"
#include "core/problem.h"
#include "core/status.h"

namespace scaled_mm {

// Which kernel config a plan runs.
enum class RowState {
  kSelected,  // the selected one, from the beginning
  kWaits,     // a stand-in, until the selected one is loaded
  kTakenOver, // the selected one, after a stand-in
  kStays,     // a stand-in: the selected one is loaded, but needs more workspace than the plan announced
};

struct RowChoice {
  const Table* table = nullptr; // nullptr: the device is a CPU
  const TableRow* row = nullptr;
  const TableRow* bucket_row = nullptr;  // nullptr also of a bucket that takes the fastest
  int32_t bucket = -1;                   // -1: the kernel config was forced by name
  const char* misfit = nullptr;          // why the bucket's kernel config, or every one, was not used
  double us = 0;                         // predicted for `row`; 0: it was not selected by time
  bool is_empty = false;                 // the bucket names no kernel config that can take it, and the output has no elements
  const TableRow* standing_in = nullptr; // nullptr: none does
  RowNeeds needs;                        // of `row`, and of the stand-in

  // Selects the kernel config named `forced`; without a name that of the bucket of `key`; if that cannot take the product, or if the bucket says so,
  // the fastest by prediction of those that can; if none can, or the output is empty, the fallback.
  // kind: for messages, "" or "grouped ". empty: whether the output is. misfit_of(needs): why a kernel config with these needs cannot take the
  // product, nullptr if it can.
  template <class MisfitOf>
  scaledMMStatus_t choose(const char* forced, const char* kind, const BucketKey& key, const ProductSize& size, bool empty, const DeviceRates& device,
                          const MisfitOf& misfit_of) {
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
      bucket = table->find_bucket(key.M, key.N, key.K, key.serves);
      const int32_t index = table->buckets[bucket].row;
      if (index != SCALED_MM_FASTEST) {
        bucket_row = &table->rows[index];
        misfit = misfit_of(bucket_row->needs);
        if (misfit == nullptr) row = bucket_row;
      }
      if (row == nullptr && empty) {
        is_empty = true;
        row = &table->rows[table->fallback_row];
      }
      if (row == nullptr) {
        const char* others = nullptr;
        const auto can_take = [&](const TableRow& one) {
          others = misfit_of(one.needs);
          return others == nullptr;
        };
        const Decision decision = fastest(*table, size, device, can_take);
        row = decision.row;
        us = decision.us;
        if (row == nullptr) {
          row = &table->rows[table->fallback_row];
          if (misfit == nullptr) misfit = others;
        }
      }
    }
    needs = row->needs;
    return SCALED_MM_STATUS_SUCCESS;
  }

  // Another kernel config runs until the selected one is loaded. Pointers must then be aligned for both.
  void stand_in(const TableRow& other) {
    standing_in = &other;
    needs.align_a = std::max(needs.align_a, other.needs.align_a);
    needs.align_b = std::max(needs.align_b, other.needs.align_b);
    needs.align_out = std::max(needs.align_out, other.needs.align_out);
  }

  // The strings live as long as the plan. kind: for messages, with the mode.
  void describe(const std::string& kind, RowState state, scaledMMKernelChoice_t* choice) {
    Reason& reason = reasons_[int(state)];
    std::call_once(reason.once, [&] { reason.text = explain(kind, state); });
    const bool waits = state == RowState::kWaits;
    choice->row = row == nullptr ? "cpu" : (waits || state == RowState::kStays ? standing_in : row)->name.c_str();
    choice->reason = reason.text.c_str();
    choice->bucket = bucket;
    choice->tuned = table && table->tuned;
    choice->better = waits ? row->name.c_str() : nullptr;
  }

private:
  static std::string rounded(double us) {
    char text[32];
    snprintf(text, sizeof(text), us < 100 ? "%.2f" : "%.0f", us);
    return text;
  }

  std::string explain(const std::string& kind, RowState state) const {
    if (row == nullptr) return "the device is a CPU";
    if (bucket < 0) return "forced by name, from " + table->source;
    std::string text = kind + ("bucket " + std::to_string(bucket)) + " of " + table->source + (table->tuned ? " (tuned)" : "");
    if (misfit) text += (bucket_row ? "; its row " + bucket_row->name : "; the other rows") + " cannot take this product (" + misfit + ")";
    if (is_empty) text += "; there is nothing to compute";
    if (misfit && us == 0 && !is_empty) text += ", so the fallback row runs";
    if (us > 0)
      text += "; " + row->name + (misfit ? " is the fastest of those that can" : " is the fastest") + " by prediction, " + rounded(us) + " us";
    if (state == RowState::kWaits) text += "; " + row->name + " is not built yet, so " + standing_in->name + " runs until it is loaded";
    if (state == RowState::kStays) {
      text += "; " + row->name + " was built later and needs a larger workspace than this plan announced, so " + standing_in->name + " stays";
    }
    return text;
  }

  struct Reason {
    std::once_flag once;
    std::string text; // written on demand
  };
  Reason reasons_[4]; // by RowState
};

} // namespace scaled_mm
