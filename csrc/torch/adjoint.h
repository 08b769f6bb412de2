// adjoint.h - segments and runs of the backward direction.
#pragma once

#include <vector>

#include "arguments.h"

namespace hcp {

// Where a gather read a row, its gradient sums what the copies received: runs
// from the gathered rows (part 0) to the rows of the source.
std::vector<hcp_run> adjoint_of(Segments segments);

// Where a sum read a row of part, its gradient is what the sum received: runs
// from the result (part 0) to the rows of that part.
std::vector<hcp_run> adjoint_of(Runs runs, int64_t part);

}  // namespace hcp
