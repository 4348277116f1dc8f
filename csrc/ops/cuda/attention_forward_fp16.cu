#include "attention_forward.cuh"

namespace mdcp::cuda {
template int forward_of<fp16>(const MdcpAttentionForward&, void*);
}
