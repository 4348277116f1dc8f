// Random segment lists through the templates of the AVX-512, bfloat16 and AMX paths, on vectors in
// plain C++ (wide_vectors.h), against the scalar path in double: wide_paths FIRST COUNT. The
// thread's scratch is filled with NaN before each call, so that what a path does not write first
// shows. Prints "COUNT cases".
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "ops/cpu/amx_tiles.h"
#include "ops/cpu/vector_backward.h"
#include "wide_vectors.h"

namespace mdcp {
namespace {

struct Case {
  Shape shape;
  Options options;
  SegmentList list;
  std::vector<int64_t> samples, positions;
  bool merge = false, accumulate = false;
  int64_t threads = 1;
};

Case make_case(std::mt19937& rng) {
  auto pick = [&](int64_t lo, int64_t hi) {
    return lo + static_cast<int64_t>(rng() % static_cast<uint64_t>(hi - lo + 1));
  };
  Case c;
  std::vector<int64_t> rows;
  int64_t q = 0, k = 0;
  for (int64_t s = pick(1, 4); s > 0; --s) {
    const int64_t longest = pick(0, 9) == 0 ? 700 : 90;
    const int64_t q_len = pick(0, longest), k_len = pick(0, longest);
    const int64_t diagonal = pick(0, 2) == 0 ? k_len + q_len : k_len - q_len + pick(-3, 3);
    const int64_t row[6] = {q, q_len, k, k_len, diagonal, pick(0, 2) ? -1 : pick(0, longest)};
    rows.insert(rows.end(), row, row + 6);
    if (pick(0, 3)) q += q_len;  // else the next segment shares its rows
    if (pick(0, 3)) k += k_len;
  }
  int64_t total_q = 0, total_k = 0;
  for (size_t i = 0; i < rows.size(); i += 6) {
    total_q = std::max(total_q, rows[i] + rows[i + 1]);
    total_k = std::max(total_k, rows[i + 2] + rows[i + 3]);
  }
  total_q += pick(0, 2);
  total_k += pick(0, 2);
  const int64_t kv_heads = pick(1, 3), group = pick(1, 3);
  c.shape = {total_q, total_k, kv_heads * group, kv_heads, 8 * pick(1, pick(0, 3) ? 9 : 20)};
  c.list = make_segments(rows.data(), static_cast<int64_t>(rows.size()) / 6, total_q, total_k);
  c.options.scale = 0.2;
  if (pick(0, 3) == 0) c.options.softcap = 3.0;
  for (int64_t i = 0; i < std::max(total_q, total_k); ++i) {
    c.samples.push_back(i % 5);
    c.positions.push_back(i);
  }
  if (pick(0, 3) == 0) {
    c.options.dropout = {0.3, 7, 0, c.samples.data(), c.positions.data(), c.positions.data()};
  }
  c.merge = pick(0, 3) == 0;
  c.accumulate = pick(0, 1) == 0;
  c.threads = pick(1, 8);
  return c;
}

struct Tensor {
  DType dtype;
  int64_t rows, heads, dim;
  std::vector<double> values;  // what is stored, exactly
  std::vector<char> bytes;

  Tensor(DType type, int64_t n, int64_t h, int64_t d)
      : dtype(type), rows(n), heads(h), dim(d), values(n * h * d), bytes(n * h * d * 8) {}

  Rows view() { return {bytes.data(), dtype, heads * dim, dim}; }
  void put(size_t i, double x) {
    const float f = static_cast<float>(x);
    if (dtype == DType::kFloat64) std::memcpy(bytes.data() + 8 * i, &x, 8);
    if (dtype == DType::kFloat32) std::memcpy(bytes.data() + 4 * i, &f, 4);
    const uint16_t half = float_to_bf16(f);
    if (dtype == DType::kBFloat16) std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  double get(size_t i) const {
    double x = 0;
    float f = 0;
    uint16_t half = 0;
    if (dtype == DType::kFloat64) std::memcpy(&x, bytes.data() + 8 * i, 8);
    if (dtype == DType::kFloat32) std::memcpy(&f, bytes.data() + 4 * i, 4), x = f;
    if (dtype == DType::kBFloat16)
      std::memcpy(&half, bytes.data() + 2 * i, 2), x = bf16_to_float(half);
    return x;
  }
  void fill(std::mt19937& rng) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < values.size(); ++i) put(i, bf16_to_float(float_to_bf16(normal(rng))));
  }
};

struct Result {
  std::vector<Tensor> tensors;  // out, dq, dk, dv
  std::vector<double> lse;
};

const Parallel kSerial = [] {
  Parallel p;
  p.run = [](int64_t count, void (*body)(int64_t, void*), void* context) {
    for (int64_t i = 0; i < count; ++i) body(i, context);
  };
  return p;
}();

void spoil_scratch() {
  constexpr int64_t kFloats = 1 << 22;
  float* p = scratch_floats(kFloats);
  std::fill(p, p + kFloats, std::numeric_limits<float>::quiet_NaN());
}

// Forward (after an earlier one, when it merges) and backward in storage `type`. `T`: the tiles, or
// void for the scalar path in double.
template <class T>
Result run(const Case& c, DType type, uint32_t seed) {
  const Shape& n = c.shape;
  const bool exact = std::is_void_v<T>;
  const DType sums = exact ? DType::kFloat64 : DType::kFloat32;
  const DType results = c.merge || c.accumulate ? sums : (exact ? DType::kFloat64 : type);
  std::mt19937 rng(seed);
  auto tensor = [&](DType t, int64_t rows, int64_t heads) { return Tensor(t, rows, heads, n.dim); };
  const DType stored = exact ? DType::kFloat64 : type;
  Tensor q = tensor(stored, n.total_q, n.heads), k = tensor(stored, n.total_k, n.kv_heads),
         v = tensor(stored, n.total_k, n.kv_heads), dout = tensor(stored, n.total_q, n.heads);
  for (Tensor* t : {&q, &k, &v, &dout}) t->fill(rng);
  Result r{
      {tensor(c.merge ? sums : stored, n.total_q, n.heads), tensor(results, n.total_q, n.heads),
       tensor(results, n.total_k, n.kv_heads), tensor(results, n.total_k, n.kv_heads)},
      {}};
  std::vector<double> lse64(n.heads * n.total_q), delta64(n.heads * n.total_q);
  std::vector<float> lse32(n.heads * n.total_q), delta32(n.heads * n.total_q);
  auto stat = [&](std::vector<double>& wide, std::vector<float>& narrow) {
    return Stat{exact ? static_cast<void*>(wide.data()) : narrow.data(), n.total_q, 1};
  };
  ForwardArgs f{n,        c.options,           q.view(),           k.view(),
                v.view(), r.tensors[0].view(), stat(lse64, lse32), false};
  Parallel parallel = kSerial;
  parallel.threads = c.threads;
  auto forward = [&] {
    if constexpr (std::is_void_v<T>) {
      scalar_forward(f, c.list, parallel);
    } else {
      spoil_scratch();
      const int64_t rows =
          forward_rows(c.list, n, Forward<T>::least_rows(n), Forward<T>::most_rows(n), c.threads);
      vector_forward<T>(f, c.list, parallel, forward_tasks(c.list, n, rows));
    }
  };
  forward();
  if (c.merge) {  // the same keys a second time
    f.merge = true;
    forward();
  }
  for (size_t i = 0; i < lse64.size(); ++i) r.lse.push_back(exact ? lse64[i] : lse32[i]);

  std::mt19937 other(seed + 1);
  if (c.accumulate) {
    for (int t = 1; t < 4; ++t) r.tensors[t].fill(other);
  }
  BackwardArgs b;
  b.shape = n;
  b.options = c.options;
  b.q = f.q, b.k = f.k, b.v = f.v, b.out = f.out, b.dout = dout.view(), b.lse = f.lse;
  b.dq = r.tensors[1].view(), b.dk = r.tensors[2].view(), b.dv = r.tensors[3].view();
  b.delta = stat(delta64, delta32);
  b.accumulate = c.accumulate;
  if constexpr (std::is_void_v<T>) {
    scalar_backward(b, c.list, parallel);
  } else {
    spoil_scratch();
    const BackwardPlan plan = backward_plan(c.list, n, Backward<T>::kQ, Backward<T>::least_keys(n),
                                            Backward<T>::most_keys(n));
    std::vector<float> partial(plan.partial_rows * n.heads * n.dim);
    vector_backward<T>(b, c.list, parallel, plan, partial.data());
  }
  return r;
}

// The largest error over the largest value.
double error(const Tensor& got, const Tensor& want) {
  double worst = 0, largest = 1e-3;
  for (size_t i = 0; i < want.values.size(); ++i) {
    const double x = got.get(i), y = want.get(i);
    worst = std::isnan(x) ? HUGE_VAL : std::max(worst, std::abs(x - y));
    largest = std::max(largest, std::abs(y));
  }
  return worst / largest;
}

bool agrees(const char* name, unsigned number, const Case& c, const Result& got, const Result& want,
            double most) {
  const char* const names[] = {"out", "dq", "dk", "dv"};
  bool good = true;
  for (int t = 0; t < 4; ++t) {
    const double e = error(got.tensors[t], want.tensors[t]);
    if (e <= most) continue;
    good = false;
    std::printf("case %u, %s: %s is off by %g (q %ld, k %ld, heads %ld/%ld, dim %ld)\n", number,
                name, names[t], e, static_cast<long>(c.shape.total_q),
                static_cast<long>(c.shape.total_k), static_cast<long>(c.shape.heads),
                static_cast<long>(c.shape.kv_heads), static_cast<long>(c.shape.dim));
  }
  for (size_t i = 0; i < want.lse.size(); ++i) {
    const bool same = want.lse[i] == got.lse[i] || std::abs(want.lse[i] - got.lse[i]) <= most;
    if (same) continue;
    std::printf("case %u, %s: lse %zu is %g, not %g\n", number, name, i, got.lse[i], want.lse[i]);
    return false;
  }
  return good;
}

}  // namespace
}  // namespace mdcp

int main(int argc, char** argv) {
  using namespace mdcp;
  if (argc != 3) {
    std::fprintf(stderr, "usage: wide_paths FIRST COUNT\n");
    return 2;
  }
  const unsigned first = static_cast<unsigned>(std::atoi(argv[1]));
  const unsigned count = static_cast<unsigned>(std::atoi(argv[2]));
  bool good = true;
  for (unsigned i = first; i < first + count; ++i) {
    std::mt19937 rng(i);
    const Case c = make_case(rng);
    const Result want = run<void>(c, DType::kFloat64, i);
    good &=
        agrees("avx512", i, c, run<Tiles<Wide, MacFloat<Wide>>>(c, DType::kFloat32, i), want, 2e-5);
    good &=
        agrees("avx512_bf16", i, c, run<Tiles<Wide, MacPairs>>(c, DType::kBFloat16, i), want, 0.03);
    good &= agrees("amx_bf16", i, c,
                   run<AmxTiles<Wide, MacPairs, WideTiles>>(c, DType::kBFloat16, i), want, 0.03);
  }
  std::printf("%u cases\n", count);
  return good ? 0 : 1;
}
