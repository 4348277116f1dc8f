// Dropout masks keyed by the sample: the bits of csrc/ops/cpu (Philox4x32-10, Salmon et al. 2011).
#pragma once

#include "api.h"
#include "simt.cuh"

namespace mdcp::cuda {

MDCP_DEVICE void philox_4x32_10(const uint32_t (&counter)[4], uint32_t k0, uint32_t k1,
                                uint32_t (&out)[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = uint32_t(b >> 32) ^ c1 ^ k0, n2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// What the weight of (q row, k row, head) is multiplied by: 0 or 1 / (1 - p); 1 without dropout.
template <class A>
MDCP_DEVICE A dropout_factor(const MdcpDropout& d, int64_t q_row, int64_t k_row, int head) {
  if (d.probability == 0) return A(1);
  const uint64_t sample = uint64_t(d.sample_ids[q_row]), position = uint64_t(d.k_positions[k_row]);
  const uint32_t counter[4] = {uint32_t(position >> 2), uint32_t(d.q_positions[q_row]),
                               uint32_t(head + d.head_offset), uint32_t(sample)};
  uint32_t words[4];
  philox_4x32_10(counter, uint32_t(d.key), uint32_t(d.key >> 32) ^ uint32_t(sample >> 32), words);
  const uint64_t threshold = uint64_t(d.probability * 4294967296.0);
  const int which = int(position & 3);
  const uint32_t word =
      which < 2 ? (which == 0 ? words[0] : words[1]) : (which == 2 ? words[2] : words[3]);
  return word >= threshold ? A(1.0 / (1.0 - d.probability)) : A(0);
}

}  // namespace mdcp::cuda
