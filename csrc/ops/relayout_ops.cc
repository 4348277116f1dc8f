// Schemas and CPU glue of the ops that move tokens and heads. Contracts: megatron_dcp/ops.
#include <algorithm>
#include <tuple>

#include "cpu/memory_bound.h"
#include "glue.h"

namespace mdcp {
namespace {

using namespace glue;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Three zigzag_partition(const Tensor& cu_seqlens, int64_t degree, int64_t total) {
  const std::vector<int64_t> cu = integers_of(cu_seqlens, "cu_seqlens");
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && !cu.empty() && cu.front() == 0,
                  "cu_seqlens must be 1-D and start at 0; got ", text_of(cu_seqlens),
                  cu.empty() ? "" : " from " + std::to_string(cu.front()), ".");
  STD_TORCH_CHECK(degree > 0, "degree must be 1 or more; got ", degree, ".");
  for (size_t i = 1; i < cu.size(); ++i) {
    STD_TORCH_CHECK(cu[i] >= cu[i - 1], "cu_seqlens must not decrease.");
  }
  STD_TORCH_CHECK(cu.back() <= total, "cu_seqlens ends at ", cu.back(), ", beyond the total of ",
                  total, " tokens.");
  const int64_t samples = static_cast<int64_t>(cu.size()) - 1;
  Tensor index = empty_cpu({total}, ScalarType::Long);
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  Tensor cu_rank = empty_cpu({degree, samples + 1}, ScalarType::Long);
  zigzag(cu.data(), samples, degree, total,
         {static_cast<int64_t*>(index.data_ptr()), static_cast<int64_t*>(positions.data_ptr()),
          static_cast<int64_t*>(cu_rank.data_ptr())});
  return {index, positions, cu_rank};
}

// `index` as a pointer, after checking that it stays inside `rows`.
const int64_t* row_index(const Tensor& index, int64_t rows) {
  const int64_t* p = indices_of(index, index.numel(), "index");
  for (int64_t i = 0; i < index.numel(); ++i) {
    STD_TORCH_CHECK(p[i] >= -1 && p[i] < rows, "index ", i, " is ", p[i], "; rows are 0 to ",
                    rows - 1, ", and -1 is no row.");
  }
  return p;
}

std::vector<int64_t> shape_with_rows(const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(x.dim() > 0 && x.is_contiguous(), "x must be contiguous, with rows in dim 0.");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape[0] = rows;
  return shape;
}

int64_t row_width(const Tensor& x) {
  int64_t width = 1;
  for (int64_t d = 1; d < x.dim(); ++d) width *= x.size(d);
  return width;
}

Tensor gather_rows_op(const Tensor& x, const Tensor& index) {
  const int64_t* rows = row_index(index, x.size(0));
  Tensor out = torch::stable::new_empty(x, shape_with_rows(x, index.numel()));
  gather_rows(static_cast<char*>(out.data_ptr()), static_cast<const char*>(x.data_ptr()), rows,
              index.numel(), row_width(x) * static_cast<int64_t>(x.element_size()),
              pool(out.numel()));
  return out;
}

Tensor scatter_rows_op(const Tensor& x, const Tensor& index, int64_t rows) {
  const int64_t* places = row_index(index, rows);
  STD_TORCH_CHECK(x.dim() > 0 && x.size(0) == index.numel(), "x must have one row per index.");
  Tensor out = torch::stable::new_zeros(x, shape_with_rows(x, rows));
  scatter_rows(out.data_ptr(), x.data_ptr(), float_type(x, "x"), places, index.numel(),
               row_width(x), pool(4 * x.numel()));
  return out;
}

// How heads are dealt to `degree` ranks.
struct Deal {
  int64_t heads, kv_heads, replicas;  // per rank; ranks that share one KV head

  Deal(int64_t all_heads, int64_t all_kv, int64_t degree) {
    STD_TORCH_CHECK(degree > 0 && all_heads % degree == 0,
                    "Ulysses needs a degree that divides the query heads; got degree ", degree,
                    " and ", all_heads, " heads.");
    STD_TORCH_CHECK(all_kv > 0 && (all_kv % degree == 0 || degree % all_kv == 0),
                    "Ulysses needs a degree that divides the KV heads or is a multiple of them; "
                    "got degree ",
                    degree, " and ", all_kv, " KV heads.");
    heads = all_heads / degree;
    replicas = degree > all_kv ? degree / all_kv : 1;
    kv_heads = degree > all_kv ? 1 : all_kv / degree;
  }
  int64_t width() const { return heads + 2 * kv_heads; }
};

// A copy between rank r's slice of a [tokens, heads, dim] tensor and its slice of the buffer.
HeadCopy slice(const Rows& x, int64_t head, const Tensor& buffer, int64_t rank, int64_t at,
               int64_t heads) {
  const int64_t bytes = element_bytes(x.dtype), dim = buffer.size(3), width = buffer.size(2);
  const int64_t tokens = buffer.size(1);
  char* inside =
      static_cast<char*>(buffer.data_ptr()) + ((rank * tokens * width) + at) * dim * bytes;
  return {static_cast<const char*>(x.at(0, head)),
          inside,
          tokens,
          heads,
          dim * bytes,
          x.row_stride * bytes,
          x.head_stride * bytes,
          width * dim * bytes,
          dim * bytes};
}

HeadCopy reversed(const HeadCopy& c) {
  return {c.target,      const_cast<char*>(c.source),
          c.tokens,      c.heads,
          c.head_bytes,  c.target_token,
          c.target_head, c.source_token,
          c.source_head};
}

Tensor ulysses_pack(const Tensor& q, const Tensor& k, const Tensor& v, int64_t degree) {
  const Rows rq = rows_of(q, "q"), rk = rows_of(k, "k"), rv = rows_of(v, "v");
  STD_TORCH_CHECK(rq.dtype == rk.dtype && rq.dtype == rv.dtype, "q, k and v must have one dtype.");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(2) == q.size(2) &&
                      v.size(2) == q.size(2) && k.size(1) == v.size(1),
                  "q, k and v must hold the same tokens and head dim, k and v the same heads.");
  const Deal deal(q.size(1), k.size(1), degree);
  const int64_t work = q.numel() / degree;
  Tensor buffer = empty_cpu({degree, q.size(0), deal.width(), q.size(2)}, q.scalar_type());
  for (int64_t r = 0; r < degree; ++r) {
    const int64_t kv = r * deal.kv_heads / deal.replicas;
    copy_heads(slice(rq, r * deal.heads, buffer, r, 0, deal.heads), pool(work));
    copy_heads(slice(rk, kv, buffer, r, deal.heads, deal.kv_heads), pool(work));
    copy_heads(slice(rv, kv, buffer, r, deal.heads + deal.kv_heads, deal.kv_heads), pool(work));
  }
  return buffer;
}

Three ulysses_unpack(const Tensor& buffer, int64_t heads, int64_t kv_heads) {
  STD_TORCH_CHECK(buffer.dim() == 4 && buffer.is_contiguous(),
                  "buffer must be a contiguous [degree, tokens, heads, dim] tensor.");
  const int64_t degree = buffer.size(0), tokens = buffer.size(1), dim = buffer.size(3);
  const Deal deal(heads, kv_heads, degree);
  STD_TORCH_CHECK(buffer.size(2) == deal.width(), "buffer must hold ", deal.width(),
                  " heads a rank (", deal.heads, " + 2 x ", deal.kv_heads, "); got ",
                  buffer.size(2), ".");
  const int64_t work = buffer.numel() / degree;
  Tensor q = empty_cpu({tokens, heads, dim}, buffer.scalar_type());
  Tensor k = empty_cpu({tokens, kv_heads, dim}, buffer.scalar_type());
  Tensor v = empty_cpu({tokens, kv_heads, dim}, buffer.scalar_type());
  const Rows rq = rows_of(q, "q"), rk = rows_of(k, "k"), rv = rows_of(v, "v");
  const int64_t rank_bytes = tokens * deal.width() * dim * element_bytes(rq.dtype);
  for (int64_t r = 0; r < degree; ++r) {
    copy_heads(reversed(slice(rq, r * deal.heads, buffer, r, 0, deal.heads)), pool(work));
    if (r % deal.replicas != 0) continue;
    const int64_t kv = r * deal.kv_heads / deal.replicas;
    sum_heads(reversed(slice(rk, kv, buffer, r, deal.heads, deal.kv_heads)), rq.dtype, dim,
              deal.replicas, rank_bytes, pool(work));
    sum_heads(reversed(slice(rv, kv, buffer, r, deal.heads + deal.kv_heads, deal.kv_heads)),
              rq.dtype, dim, deal.replicas, rank_bytes, pool(work));
  }
  return {q, k, v};
}

Tensor ulysses_join(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && x.is_contiguous(),
                  "x must be a contiguous [degree, tokens, heads, dim] tensor.");
  const int64_t degree = x.size(0), heads = x.size(2),
                work = x.numel() / std::max<int64_t>(1, degree);
  Tensor out = empty_cpu({x.size(1), degree * heads, x.size(3)}, x.scalar_type());
  const Rows rows = rows_of(out, "out");
  for (int64_t r = 0; r < degree; ++r) {
    copy_heads(reversed(slice(rows, r * heads, x, r, 0, heads)), pool(work));
  }
  return out;
}

Tensor ulysses_split(const Tensor& x, int64_t degree) {
  const Rows rows = rows_of(x, "x");
  STD_TORCH_CHECK(degree > 0 && x.size(1) % degree == 0, "degree ", degree,
                  " must divide the heads; got ", x.size(1), ".");
  const int64_t heads = x.size(1) / degree, work = x.numel() / degree;
  Tensor out = empty_cpu({degree, x.size(0), heads, x.size(2)}, x.scalar_type());
  for (int64_t r = 0; r < degree; ++r) {
    copy_heads(slice(rows, r * heads, out, r, 0, heads), pool(work));
  }
  return out;
}

void zero_padding(Tensor x, const Tensor& cu_seqlens) {
  const std::vector<int64_t> cu = integers_of(cu_seqlens, "cu_seqlens");
  const int64_t rows = x.dim() > 0 ? x.size(0) : 0;
  STD_TORCH_CHECK(!cu.empty() && cu.back() >= 0 && cu.back() <= rows,
                  "cu_seqlens must end inside the ", rows, " rows of x.");
  if (cu.back() == rows) return;
  Tensor tail = torch::stable::narrow(x, 0, cu.back(), rows - cu.back());
  torch::stable::zero_(tail);
}

}  // namespace
}  // namespace mdcp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_dcp, m) {
  m.def(
      "zigzag_partition(Tensor cu_seqlens, int degree, SymInt total) "
      "-> (Tensor index, Tensor positions, Tensor cu_rank)");
  m.def("gather_rows(Tensor x, Tensor index) -> Tensor");
  m.def("scatter_rows(Tensor x, Tensor index, SymInt rows) -> Tensor");
  m.def("ulysses_pack(Tensor q, Tensor k, Tensor v, int degree) -> Tensor");
  m.def("ulysses_unpack(Tensor buffer, int heads, int kv_heads) -> (Tensor q, Tensor k, Tensor v)");
  m.def("ulysses_join(Tensor x) -> Tensor");
  m.def("ulysses_split(Tensor x, int degree) -> Tensor");
  m.def("zero_padding_(Tensor(a!) x, Tensor cu_seqlens) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_dcp, CPU, m) {
  m.impl("zigzag_partition", TORCH_BOX(&mdcp::zigzag_partition));
  m.impl("gather_rows", TORCH_BOX(&mdcp::gather_rows_op));
  m.impl("scatter_rows", TORCH_BOX(&mdcp::scatter_rows_op));
  m.impl("ulysses_pack", TORCH_BOX(&mdcp::ulysses_pack));
  m.impl("ulysses_unpack", TORCH_BOX(&mdcp::ulysses_unpack));
  m.impl("ulysses_join", TORCH_BOX(&mdcp::ulysses_join));
  m.impl("ulysses_split", TORCH_BOX(&mdcp::ulysses_split));
  m.impl("zero_padding_", TORCH_BOX(&mdcp::zero_padding));
}
