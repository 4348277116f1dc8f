// Ops that move tokens and heads: zigzag partition, row gather and scatter, Ulysses buffers, zero
// padding. One group of threads a row, 16 bytes a thread where alignment allows.
#include "numeric.cuh"

namespace mdcp::cuda {
namespace {

constexpr int kThreads = 256;

template <int BYTES>
struct Vector {
  struct alignas(BYTES) type {
    unsigned char bytes[BYTES];
  };
};
template <>
struct Vector<16> {
  struct alignas(16) type {
    uint64_t low, high;
  };
};
template <>
struct Vector<8> {
  using type = uint64_t;
};
template <>
struct Vector<4> {
  using type = uint32_t;
};
template <>
struct Vector<2> {
  using type = uint16_t;
};

// The widest access that divides every one of the given addresses, strides and sizes.
int common_bytes(std::initializer_list<int64_t> values) {
  int bytes = 16;
  for (const int64_t value : values)
    while (value % bytes != 0) bytes /= 2;
  return bytes;
}
int64_t address(const void* pointer) { return int64_t(reinterpret_cast<uintptr_t>(pointer)); }

template <class Function>
int by_width(int bytes, const Function& function) {
  switch (bytes) {
    case 16:
      return function(std::integral_constant<int, 16>());
    case 8:
      return function(std::integral_constant<int, 8>());
    case 4:
      return function(std::integral_constant<int, 4>());
    case 2:
      return function(std::integral_constant<int, 2>());
    default:
      return function(std::integral_constant<int, 1>());
  }
}

// Threads that share one row: a power of two up to a warp.
int lanes_for(int64_t items) {
  int lanes = 1;
  while (lanes < kWarp && lanes < items) lanes *= 2;
  return lanes;
}

int64_t blocks_for(int64_t rows, int lanes) {
  const int64_t blocks = (rows * lanes + kThreads - 1) / kThreads;
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

// This thread's group among all groups of `lanes`, and how many there are.
struct Group {
  int64_t index, count;
  int lane, lanes;
  MDCP_DEVICE explicit Group(int lanes_)
      : index((int64_t(block_index()) * block_size() + thread_index()) / lanes_),
        count(int64_t(block_count()) * block_size() / lanes_),
        lane(thread_index() % lanes_),
        lanes(lanes_) {}
};

// --- zigzag ----------------------------------------------------------------------------------

MDCP_DEVICE int64_t chunk_start(int64_t length, int64_t chunk, int64_t degree) {
  return chunk * length / (2 * degree);
}

struct CuRankParams {
  const int64_t* cu;
  int64_t samples, degree, total;
  int64_t* cu_rank;  // [degree, samples + 1]
};

// A block per rank: prefix sums of the rank's share of each sample, kThreads samples at a time.
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) cu_rank_kernel(const CuRankParams p) {
  MDCP_SHARED_ARRAY(int64_t, sums, 2 * kThreads);
  const int64_t rank = block_index(), t = thread_index();
  int64_t* const out = p.cu_rank + rank * (p.samples + 1);
  if (t == 0) {
    trap_unless(p.cu[0] == 0 && p.cu[p.samples] <= p.total);
    out[0] = 0;
  }
  int64_t before = 0;
  for (int64_t first = 0; first < p.samples; first += kThreads) {
    int64_t share = 0;
    if (first + t < p.samples) {
      const int64_t length = p.cu[first + t + 1] - p.cu[first + t];
      trap_unless(length >= 0);
      const int64_t mirror = 2 * p.degree - 1 - rank;
      share = chunk_start(length, rank + 1, p.degree) - chunk_start(length, rank, p.degree) +
              chunk_start(length, mirror + 1, p.degree) - chunk_start(length, mirror, p.degree);
    }
    int from = 0;
    sums[t] = share;
    for (int distance = 1; distance < kThreads; distance *= 2) {
      block_sync();  // the round before is complete
      const int64_t value = sums[from + t] + (t >= distance ? sums[from + t - distance] : 0);
      from = kThreads - from;
      sums[from + t] = value;
    }
    block_sync();
    if (first + t < p.samples) out[first + t + 1] = before + sums[from + t];
    before += sums[from + kThreads - 1];
    block_sync();  // everyone has read the total
  }
}

struct ZigzagParams {
  const int64_t *cu, *cu_rank;
  int64_t samples, degree, total;
  int64_t *index, *positions;
};

// A thread per packed row: finds its sample, chunk and place.
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) zigzag_kernel(const ZigzagParams p) {
  const Group group(1);
  const int64_t tokens = p.cu[p.samples];
  for (int64_t row = group.index; row < p.total; row += group.count) {
    if (row >= tokens) {
      p.index[row] = -1;
      p.positions[row] = 0;
      continue;
    }
    int64_t low = 0, high = p.samples;  // cu[low] <= row < cu[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (p.cu[middle] <= row ? low : high) = middle;
    }
    const int64_t length = p.cu[low + 1] - p.cu[low], offset = row - p.cu[low];
    int64_t chunk = offset * 2 * p.degree / length;
    while (chunk_start(length, chunk + 1, p.degree) <= offset) ++chunk;
    const bool mirrored = chunk >= p.degree;
    const int64_t rank = mirrored ? 2 * p.degree - 1 - chunk : chunk;
    int64_t place =
        p.cu_rank[rank * (p.samples + 1) + low] + offset - chunk_start(length, chunk, p.degree);
    if (mirrored)
      place += chunk_start(length, rank + 1, p.degree) - chunk_start(length, rank, p.degree);
    for (int64_t r = 0; r < rank; ++r) place += p.cu_rank[r * (p.samples + 1) + p.samples];
    p.index[place] = row;
    p.positions[place] = offset;
  }
}

// --- rows ------------------------------------------------------------------------------------

struct GatherParams {
  void* out;
  const void* x;
  const int64_t* index;
  int64_t count, x_rows, width;  // width in vectors
  int lanes;
};

template <class V>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) gather_kernel(const GatherParams p) {
  const Group group(p.lanes);
  for (int64_t row = group.index; row < p.count; row += group.count) {
    const int64_t from = p.index[row];
    trap_unless(from >= -1 && from < p.x_rows);
    const V* const source = static_cast<const V*>(p.x) + from * p.width;
    V* const target = static_cast<V*>(p.out) + row * p.width;
    for (int64_t i = group.lane; i < p.width; i += group.lanes)
      target[i] = from < 0 ? V{} : source[i];
  }
}

struct ScatterParams {
  void* out;  // zeros
  const void* x;
  const int64_t* index;
  int64_t count, rows, width;  // width in elements
  int *owner, *sharers;        // [rows]: count - first row of x that goes there; how many do
  int lanes;
};

MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) scatter_owner_kernel(const ScatterParams p) {
  const Group group(1);
  for (int64_t row = group.index; row < p.count; row += group.count) {
    const int64_t to = p.index[row];
    trap_unless(to >= -1 && to < p.rows);
    if (to < 0) continue;
    atomic_max(p.owner + to, int(p.count - row));
    atomic_add(p.sharers + to, 1);
  }
}

// The first row that goes to a place adds all of them, in order: deterministic, and one pass where
// no two rows meet.
template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) scatter_kernel(const ScatterParams p) {
  using A = typename Accumulation<T>::type;
  const Group group(p.lanes);
  for (int64_t first = group.index; first < p.count; first += group.count) {
    const int64_t to = p.index[first];
    if (to < 0 || p.owner[to] != int(p.count - first)) continue;
    T* const target = static_cast<T*>(p.out) + to * p.width;
    int left = p.sharers[to];
    for (int64_t row = first; left > 0; ++row) {
      if (p.index[row] != to) continue;
      --left;
      const T* const source = static_cast<const T*>(p.x) + row * p.width;
      for (int64_t i = group.lane; i < p.width; i += group.lanes)
        target[i] = row == first ? source[i] : narrow<T>(widen<A>(target[i]) + widen<A>(source[i]));
    }
  }
}

// --- heads -----------------------------------------------------------------------------------

struct HeadsParams {
  MdcpRows q, k, v;  // [T, H, D], [T, Hk, D] twice (or none)
  void* buffer;      // [degree, T, heads + 2 * kv_heads, D]
  int64_t tokens, degree;
  int64_t heads, kv_heads, replicas;  // per rank; ranks that hold one KV head
  int64_t width;                      // of D, in vectors (pack) or elements (unpack)
  int64_t unit;                       // elements of one vector
  int lanes;
};

template <class V>
MDCP_DEVICE V* head_of(const MdcpRows& rows, int64_t token, int64_t head, int64_t unit) {
  return static_cast<V*>(rows.data) + (token * rows.row_stride + head * rows.head_stride) / unit;
}

template <class V>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) pack_kernel(const HeadsParams p) {
  const Group group(p.lanes);
  const int64_t slots = p.heads + 2 * p.kv_heads, items = p.degree * p.tokens * slots;
  for (int64_t item = group.index; item < items; item += group.count) {
    const int64_t slot = item % slots, token = item / slots % p.tokens;
    const int64_t rank = item / slots / p.tokens, kv = rank * p.kv_heads / p.replicas;
    const V* source;
    if (slot < p.heads)
      source = head_of<V>(p.q, token, rank * p.heads + slot, p.unit);
    else if (slot < p.heads + p.kv_heads)
      source = head_of<V>(p.k, token, kv + slot - p.heads, p.unit);
    else
      source = head_of<V>(p.v, token, kv + slot - p.heads - p.kv_heads, p.unit);
    V* const target = static_cast<V*>(p.buffer) + item * p.width;
    for (int64_t i = group.lane; i < p.width; i += group.lanes) target[i] = source[i];
  }
}

// The adjoint: copies of a KV head are added in rank order.
template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) unpack_kernel(const HeadsParams p) {
  using A = typename Accumulation<T>::type;
  const Group group(p.lanes);
  const int64_t slots = p.heads + 2 * p.kv_heads, all_q = p.heads * p.degree;
  const int64_t all_kv = p.kv_heads * p.degree / p.replicas, all = all_q + 2 * all_kv;
  for (int64_t item = group.index; item < p.tokens * all; item += group.count) {
    const int64_t token = item / all, head = item % all;
    const bool is_q = head < all_q, is_v = head >= all_q + all_kv;
    const int64_t own = is_q ? head : head - all_q - (is_v ? all_kv : 0);
    const int64_t per_rank = is_q ? p.heads : p.kv_heads;
    const int64_t rank = own / per_rank * (is_q ? 1 : p.replicas);
    const int64_t slot = own % per_rank + (is_q ? 0 : p.heads) + (is_v ? p.kv_heads : 0);
    const MdcpRows& rows = is_q ? p.q : is_v ? p.v : p.k;
    const T* const source =
        static_cast<const T*>(p.buffer) + ((rank * p.tokens + token) * slots + slot) * p.width;
    T* const target = head_of<T>(rows, token, own, 1);
    const int64_t copies = is_q ? 1 : p.replicas, distance = p.tokens * slots * p.width;
    for (int64_t i = group.lane; i < p.width; i += group.lanes) {
      if (copies == 1) {
        target[i] = source[i];
        continue;
      }
      A sum = 0;
      for (int64_t c = 0; c < copies; ++c) sum += widen<A>(source[c * distance + i]);
      target[i] = narrow<T>(sum);
    }
  }
}

// --- padding ---------------------------------------------------------------------------------

struct PaddingParams {
  void* x;
  const int64_t* last;  // cu_seqlens + B, on the device
  int64_t rows, width;  // width in vectors
  int lanes;
};

template <class V>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) padding_kernel(const PaddingParams p) {
  const Group group(p.lanes);
  const int64_t first = *p.last;
  trap_unless(first >= 0 && first <= p.rows);
  for (int64_t row = first + group.index; row < p.rows; row += group.count) {
    V* const target = static_cast<V*>(p.x) + row * p.width;
    for (int64_t i = group.lane; i < p.width; i += group.lanes) target[i] = V{};
  }
}

}  // namespace
}  // namespace mdcp::cuda

using namespace mdcp::cuda;

int mdcp_cuda_zigzag(const int64_t* cu, int64_t samples, int64_t degree, int64_t total,
                     int64_t* index, int64_t* positions, int64_t* cu_rank, void* stream) {
  if (samples < 0 || degree < 1 || total < 0) return MDCP_CUDA_BAD_ARGUMENT;
  const CuRankParams shares{cu, samples, degree, total, cu_rank};
  if (const int error = launch(&cu_rank_kernel, shares, degree, kThreads, 0, stream)) return error;
  const ZigzagParams params{cu, cu_rank, samples, degree, total, index, positions};
  return launch(&zigzag_kernel, params, blocks_for(total, 1), kThreads, 0, stream);
}

int mdcp_cuda_gather_rows(void* out, const void* x, const int64_t* index, int64_t count,
                          int64_t x_rows, int64_t row_bytes, void* stream) {
  if (count <= 0 || row_bytes <= 0) return 0;
  return by_width(common_bytes({address(out), address(x), row_bytes}), [&](auto bytes) {
    constexpr int B = decltype(bytes)::value;
    const int lanes = lanes_for(row_bytes / B);
    const GatherParams params{out, x, index, count, x_rows, row_bytes / B, lanes};
    return launch(&gather_kernel<typename Vector<B>::type>, params, blocks_for(count, lanes),
                  kThreads, 0, stream);
  });
}

int mdcp_cuda_scatter_rows(void* out, const void* x, const int64_t* index, int64_t count,
                           int64_t rows, int64_t width, int dtype, int32_t* scratch, void* stream) {
  if (count <= 0 || width <= 0) return 0;
  if (count >= INT32_MAX || rows >= INT32_MAX) return MDCP_CUDA_BAD_ARGUMENT;
  if (const int error = zero_bytes(scratch, 2 * rows * int64_t(sizeof(int32_t)), stream))
    return error;
  const int lanes = lanes_for(width);
  const ScatterParams params{out, x, index, count, rows, width, scratch, scratch + rows, lanes};
  if (const int error =
          launch(&scatter_owner_kernel, params, blocks_for(count, 1), kThreads, 0, stream))
    return error;
  return by_dtype(dtype, [&](auto zero) {
    return launch(&scatter_kernel<decltype(zero)>, params, blocks_for(count, lanes), kThreads, 0,
                  stream);
  });
}

namespace {

int64_t element_bytes(int64_t dtype) { return dtype == MDCP_F64 ? 8 : dtype == MDCP_F32 ? 4 : 2; }

bool deal(const MdcpHeads& a, HeadsParams& p) {
  if (a.degree < 1 || a.heads % a.degree != 0) return false;
  if (a.kv_heads != 0 && a.kv_heads % a.degree != 0 && a.degree % a.kv_heads != 0) return false;
  const bool shared = a.kv_heads != 0 && a.degree > a.kv_heads;
  p = {a.q,
       a.k,
       a.v,
       a.buffer,
       a.tokens,
       a.degree,
       a.heads / a.degree,
       shared ? 1 : a.kv_heads / a.degree,
       shared ? a.degree / a.kv_heads : 1,
       a.dim,
       1,
       1};
  return true;
}

}  // namespace

int mdcp_cuda_ulysses_pack(const MdcpHeads* args, void* stream) {
  HeadsParams p;
  if (!deal(*args, p)) return MDCP_CUDA_BAD_ARGUMENT;
  const int64_t size = element_bytes(args->q.dtype);
  const int64_t items = p.degree * p.tokens * (p.heads + 2 * p.kv_heads);
  if (items <= 0 || args->dim <= 0) return 0;
  int bytes = common_bytes({address(p.buffer), args->dim * size});
  for (const MdcpRows* rows : {&p.q, &p.k, &p.v})
    if (args->kv_heads != 0 || rows == &p.q)
      bytes = common_bytes(
          {bytes, address(rows->data), rows->row_stride * size, rows->head_stride * size});
  return by_width(bytes, [&](auto chosen) {
    constexpr int B = decltype(chosen)::value;
    p.unit = B / size;
    p.width = args->dim * size / B;
    p.lanes = lanes_for(p.width);
    return launch(&pack_kernel<typename Vector<B>::type>, p, blocks_for(items, p.lanes), kThreads,
                  0, stream);
  });
}

int mdcp_cuda_ulysses_unpack(const MdcpHeads* args, void* stream) {
  HeadsParams p;
  if (!deal(*args, p)) return MDCP_CUDA_BAD_ARGUMENT;
  p.lanes = lanes_for(p.width);
  const int64_t items = p.tokens * (args->heads + 2 * args->kv_heads);
  if (items <= 0 || args->dim <= 0) return 0;
  return by_dtype(int(args->q.dtype), [&](auto zero) {
    return launch(&unpack_kernel<decltype(zero)>, p, blocks_for(items, p.lanes), kThreads, 0,
                  stream);
  });
}

int mdcp_cuda_zero_padding(void* x, int64_t rows, int64_t row_bytes, const int64_t* cu,
                           int64_t samples, void* stream) {
  if (rows <= 0 || row_bytes <= 0) return 0;
  return by_width(common_bytes({address(x), row_bytes}), [&](auto bytes) {
    constexpr int B = decltype(bytes)::value;
    const int lanes = lanes_for(row_bytes / B);
    const PaddingParams params{x, cu + samples, rows, row_bytes / B, lanes};
    return launch(&padding_kernel<typename Vector<B>::type>, params, blocks_for(rows, lanes),
                  kThreads, 0, stream);
  });
}
