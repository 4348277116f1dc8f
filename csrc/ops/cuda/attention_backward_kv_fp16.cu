#include "attention_backward.cuh"

namespace mdcp::cuda {
template int backward_kv_of<fp16>(const MdcpAttentionBackward&, void*);
}
