// adjoint.cpp - segments and runs of the backward direction.
#include "adjoint.h"

#include <algorithm>

namespace hcp {

// Every row at which a run begins or ends, once, ascending.
static Sizes cuts_of(const std::vector<hcp_run> &runs) {
  Sizes cuts;
  for (const hcp_run &run : runs) {
    cuts.push_back(run.row);
    cuts.push_back(run.row + run.rows);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

// Runs in any order, which may overlap, as hcp_check_runs wants them:
// cut wherever any of them begins or ends, two pieces name the same rows or none
// in common. Pieces of the same rows stay in the order of the runs, so that sums
// have one order.
static std::vector<hcp_run> ordered(const std::vector<hcp_run> &runs) {
  Sizes cuts = cuts_of(runs);
  std::vector<hcp_run> pieces;
  for (const hcp_run &run : runs) {
    int64_t begin = run.row, end = run.row + run.rows;
    for (auto cut = std::upper_bound(cuts.begin(), cuts.end(), begin); begin < end; ++cut) {
      pieces.push_back({begin, *cut - begin, run.part, run.part_row + begin - run.row});
      begin = *cut;
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const hcp_run &a, const hcp_run &b) { return a.row < b.row; });
  return pieces;
}

std::vector<hcp_run> adjoint_of(Segments segments) {
  std::vector<hcp_run> runs;
  int64_t row = 0;
  for (int64_t s = 0; s < segments.n; ++s) {
    const hcp_segment &segment = segments.data[s];
    if (segment.row >= 0 && segment.rows > 0) runs.push_back({segment.row, segment.rows, 0, row});
    row += segment.rows;
  }
  return ordered(runs);
}

std::vector<hcp_run> adjoint_of(Runs runs, int64_t part) {
  std::vector<hcp_run> adjoint;
  for (int64_t r = 0; r < runs.n; ++r) {
    const hcp_run &run = runs.data[r];
    if (run.part == part) adjoint.push_back({run.part_row, run.rows, 0, run.row});
  }
  return ordered(adjoint);
}

}  // namespace hcp
