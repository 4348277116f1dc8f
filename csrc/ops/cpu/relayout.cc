// Who holds which token and head: zigzag partition, row gather and scatter, head exchange buffers.
#include <algorithm>
#include <cstring>

#include "memory_bound.h"
#include "typed.h"

namespace mdcp {

void zigzag(const int64_t* cu, int64_t samples, int64_t degree, int64_t total,
            const ZigzagOut& out) {
  int64_t place = 0;
  for (int64_t rank = 0; rank < degree; ++rank) {
    int64_t* cu_rank = out.cu_rank + rank * (samples + 1);
    const int64_t start = place;
    cu_rank[0] = 0;
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t length = cu[s + 1] - cu[s];
      for (const int64_t chunk : {rank, 2 * degree - 1 - rank}) {
        const int64_t end = (chunk + 1) * length / (2 * degree);
        for (int64_t p = chunk * length / (2 * degree); p < end; ++p, ++place) {
          out.index[place] = cu[s] + p;
          out.positions[place] = p;
        }
      }
      cu_rank[s + 1] = place - start;
    }
  }
  std::fill(out.index + place, out.index + total, -1);
  std::fill(out.positions + place, out.positions + total, 0);
}

void gather_rows(char* out, const char* x, const int64_t* index, int64_t count, int64_t bytes,
                 const Parallel& parallel) {
  constexpr int64_t kBlock = 64;
  parallel((count + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t i = block * kBlock; i < std::min(count, (block + 1) * kBlock); ++i) {
      if (index[i] < 0) {
        std::memset(out + i * bytes, 0, bytes);
      } else {
        std::memcpy(out + i * bytes, x + index[i] * bytes, bytes);
      }
    }
  });
}

void scatter_rows(void* out, const void* x, DType dtype, const int64_t* index, int64_t count,
                  int64_t width, const Parallel& parallel) {
  // Parallel over columns, so that rows that meet are added in one order.
  constexpr int64_t kColumns = 256;
  with_element(dtype, [&](auto tag) {
    using E = decltype(tag);
    auto* to = static_cast<E*>(out);
    const auto* from = static_cast<const E*>(x);
    parallel((width + kColumns - 1) / kColumns, [&](int64_t block) {
      const int64_t first = block * kColumns, n = std::min(kColumns, width - first);
      for (int64_t i = 0; i < count; ++i) {
        if (index[i] < 0) continue;
        E* target = to + index[i] * width + first;
        const E* source = from + i * width + first;
        for (int64_t c = 0; c < n; ++c) {
          target[c] = Element<E>::store(Element<E>::load(target[c]) + Element<E>::load(source[c]));
        }
      }
    });
  });
}

void copy_heads(const HeadCopy& c, const Parallel& parallel) {
  constexpr int64_t kBlock = 32;
  parallel((c.tokens + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t t = block * kBlock; t < std::min(c.tokens, (block + 1) * kBlock); ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        std::memcpy(c.target + t * c.target_token + h * c.target_head,
                    c.source + t * c.source_token + h * c.source_head, c.head_bytes);
      }
    }
  });
}

void sum_heads(const HeadCopy& c, DType dtype, int64_t dim, int64_t replicas,
               int64_t source_replica, const Parallel& parallel) {
  if (replicas == 1) return copy_heads(c, parallel);
  with_element(dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel(c.tokens, [&](int64_t t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const char* source = c.source + t * c.source_token + h * c.source_head;
        auto* target = reinterpret_cast<E*>(c.target + t * c.target_token + h * c.target_head);
        for (int64_t d = 0; d < dim; ++d) {
          typename Element<E>::Acc sum = 0;
          for (int64_t r = 0; r < replicas; ++r) {
            sum += Element<E>::load(reinterpret_cast<const E*>(source + r * source_replica)[d]);
          }
          target[d] = Element<E>::store(sum);
        }
      }
    });
  });
}

}  // namespace mdcp
