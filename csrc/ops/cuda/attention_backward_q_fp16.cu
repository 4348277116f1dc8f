#include "attention_backward.cuh"

namespace mdcp::cuda {
template int backward_q_of<fp16>(const MdcpAttentionBackward&, void*);
}
