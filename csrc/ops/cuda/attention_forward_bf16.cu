#include "attention_forward.cuh"

namespace mdcp::cuda {
template int forward_of<bf16>(const MdcpAttentionForward&, void*);
}
