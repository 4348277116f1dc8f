// Warp-wide operations of the SIMT machine, executed once all 32 lanes have brought their operands.
#pragma once

#include "simt.h"

namespace mdcp::cuda::emulate {

void execute(Operation operation, Operand* const (&lanes)[kWarp]);

}  // namespace mdcp::cuda::emulate
