#include "attention_backward.cuh"

namespace mdcp::cuda {
template int backward_kv_of<bf16>(const MdcpAttentionBackward&, void*);
}
