// Deals tiles to thread blocks as the kernels do, and counts: each step of each tile must be multiplied once, parts of a tile must lie at
// places of their own, and the kernel that adds them must find all of them in the order of K. Numbers of tiles must name each place once, and
// those that follow one another must be of few rows and few tokens. On the host alone.
#include <climits>
#include <cstdio>
#include <set>
#include <tuple>
#include <vector>

#include "gguf/shares.cuh"

using namespace scaled_mm::gguf;

struct Found {
  int wrong = 0, shared = 0, two_parts = 0;
};

void deal(int tiles, int steps, int slots, int most, int tokens, Found* found) {
  const Shares shares = share_tiles(tiles, steps, slots, most, tokens);
  std::vector<int> times(size_t(tiles) * steps), whole(tiles);
  std::vector<std::vector<std::tuple<int, int, int>>> parts(tiles); // (thread block, first step, steps)
  std::set<int64_t> places;
  found->wrong += shares.thread_blocks < shares.blocks || (shares.blocks > 0 && shares.blocks > slots) || shares.blocks > shares.tiles * most;
  for (int block = 0; block < shares.thread_blocks; ++block) {
    Share share;
    share.fill(shares, block);
    Work work = Work::begin(shares, block);
    int own = 0;
    do {
      const Part part = work.whole() ? Part{work.at, 0, steps} : share[work];
      if (part.count == 0 && !work.whole()) continue;
      if (part.tile < 0 || part.tile >= tiles || part.count < 0 || part.begin < 0 || part.begin + part.count > steps) {
        ++found->wrong;
        continue;
      }
      for (int i = 0; i < part.count; ++i) ++times[size_t(part.tile) * steps + part.begin + i];
      if (work.whole()) {
        ++whole[part.tile];
        found->wrong += part.tile >= shares.whole;
      } else {
        ++own;
        parts[part.tile].emplace_back(block, part.begin, part.count);
        const int64_t place = shares.place_of(block, part.tile);
        found->wrong += !places.insert(place).second || place < 0 || place >= shares.blocks + shares.tiles - 1;
      }
    } while (work.advance(shares, block, shares.thread_blocks));
    found->two_parts += own == 2;
  }
  for (const int n : times) found->wrong += n != 1;
  for (int tile = 0; tile < tiles; ++tile) {
    found->wrong += whole[tile] != (tile < shares.whole);
    if (tile < shares.whole || steps == 0) continue;
    const int from = (tile - shares.whole) * steps, first = shares.block_of(from), last = shares.block_of(from + steps - 1);
    int at = 0, block = first;
    found->wrong += int(parts[tile].size()) != last - first + 1;
    for (const auto& [by, begin, count] : parts[tile]) {
      found->wrong += by != block++ || begin != at;
      at += count;
    }
    found->wrong += at != steps;
  }
  found->shared += shares.blocks > 0;
}

// Numbers all tiles: each place once; tiles of a panel that follow one another have the same rows or the next ones.
int misplaced(int rows, int tokens) {
  const OutputTiles grid = OutputTiles::of(rows, tokens);
  std::set<std::pair<int, int>> places;
  int wrong = 0;
  OutputTiles::Place before{0, 0};
  for (int tile = 0; tile < rows * tokens; ++tile) {
    const OutputTiles::Place at = grid.place_of(tile);
    wrong +=
        at.row_tile < 0 || at.row_tile >= rows || at.token_tile < 0 || at.token_tile >= tokens || !places.emplace(at.row_tile, at.token_tile).second;
    const bool same_panel = at.token_tile / OutputTiles::kPanel == before.token_tile / OutputTiles::kPanel;
    wrong += same_panel ? at.row_tile < before.row_tile || at.row_tile > before.row_tile + 1 : at.row_tile != 0 || before.row_tile != rows - 1;
    before = at;
  }
  const OutputTiles::Place beyond = grid.place_of(rows * tokens); // of a share's last part, if that has no steps
  return wrong + (beyond.row_tile < rows && beyond.token_tile < tokens);
}

// The last tile of a grid that has as many as there may be.
int misplaced_last(int rows, int tokens) {
  const OutputTiles::Place at = OutputTiles::of(rows, tokens).place_of(rows * tokens - 1);
  return at.row_tile != rows - 1 || at.token_tile != tokens - 1;
}

int main() {
  Found found;
  for (const int rows : {1, 2, 3, 32, 224}) {
    for (const int tokens : {1, 2, 3, 4, 5, 7, 8, 16, 17}) found.wrong += misplaced(rows, tokens);
  }
  found.wrong += misplaced_last(INT_MAX, 1) + misplaced_last(1, INT_MAX) + misplaced_last(INT_MAX / 3, 3) + misplaced_last(INT_MAX / 7, 7);
  for (const int slots : {0, 1, 2, 7, 114, 132, 264}) {
    for (const int tiles : {1, 2, 3, 8, 31, 32, 66, 113, 131, 132, 133, 150, 224, 264, 300, 449, 900}) {
      for (const int steps : {0, 1, 2, 3, 4, 16, 17, 32, 56, 112}) {
        for (const int most : {1, 2, 5, 16}) {
          for (const int tokens : {64, 256}) deal(tiles, steps, slots, most, tokens, &found);
        }
      }
    }
  }
  const Shares large = share_tiles(100, 1 << 25, 132, 16, 128); // more steps than an int counts
  printf("%d %d %d %d\n", found.wrong, found.shared > 1000, found.two_parts > 1000, large.blocks);
}
