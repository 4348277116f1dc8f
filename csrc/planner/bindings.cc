// Python's door to the planner: the only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "planner/search.h"

namespace py = pybind11;

namespace {

using mdcp::i64;

double number(const py::handle& object, const char* name) {
  return py::cast<double>(py::float_(object.attr(name)));
}

mdcp::Profile read_profile(const py::handle& p) {
  mdcp::Profile out;
  const py::object model = p.attr("model");
  out.layers = model.attr("layers").cast<int>();
  out.heads = model.attr("heads").cast<int>();
  out.kv_heads = model.attr("kv_heads").cast<int>();
  out.head_dim = model.attr("head_dim").cast<int>();
  out.element_bytes = model.attr("element_bytes").cast<int>();
  const std::string pairs = p.attr("pairs").cast<std::string>();
  out.pairs = pairs == "causal" ? mdcp::Pairs::causal
              : pairs == "full" ? mdcp::Pairs::full
                                : mdcp::Pairs::grid;
  out.linear_us = number(p, "linear_us_per_token");
  out.attn_us = number(p, "attn_us_per_pair");
  out.spatial_us = number(p, "attn_spatial_us_per_pair");
  out.temporal_us = number(p, "attn_temporal_us_per_pair");
  out.linear_half = number(p, "linear_half_tokens");
  out.attn_half = number(p, "attn_half_tokens");
  const py::object again = p.attr("recompute_fraction");
  out.again_linear = number(again, "linear");
  out.again_attention = number(again, "attention");
  out.again_comm = number(again, "comm");
  out.overhead_async = number(p.attr("overhead_us"), "async_");
  out.overhead_lockstep = number(p.attr("overhead_us"), "lockstep");
  for (const py::handle& row : p.attr("links"))
    out.links.push_back({row.attr("max_degree").cast<int>(), number(row, "us_per_byte"),
                         number(row, "latency_us")});
  const py::object overlap = p.attr("overlap");
  out.overlap_ring = number(overlap, "ring");
  out.overlap_ulysses = number(overlap, "ulysses");
  out.overlap_allgather = number(overlap, "allgather");
  const py::object comm = p.attr("comm_bytes_per_token_layer");
  out.own_comm = !comm.is_none();
  if (out.own_comm) out.comm_bytes = number(p, "comm_bytes_per_token_layer");
  out.static_bytes = number(p, "static_bytes");
  out.kept = number(p, "kept_bytes_per_token_layer");
  out.checkpoint = number(p, "checkpoint_bytes_per_token_layer");
  out.working = number(p, "working_bytes_per_token");
  out.head_bytes = number(p, "head_bytes_per_token");
  return out;
}

// request: megatron_dcp.planner.PlanRequest, already validated by its constructors.
mdcp::Request read_request(const py::handle& request) {
  mdcp::Request q;
  q.profile = read_profile(request.attr("profile"));
  const py::object topology = request.attr("topology");
  q.ranks = topology.attr("data_ranks").cast<int>();
  q.per_node = topology.attr("ranks_per_node").cast<int>();
  q.stages = topology.attr("pipeline_stages").cast<int>();
  q.virtual_stages = topology.attr("virtual_stages").cast<int>();
  if (!topology.attr("speed").is_none()) q.speed = topology.attr("speed").cast<std::vector<int>>();
  q.lockstep = request.attr("lockstep").cast<int>();
  q.budget = request.attr("budget_bytes").cast<i64>();
  q.recompute = request.attr("recompute").cast<bool>();
  const py::object workload = request.attr("workload");
  const auto lengths = workload.attr("lengths").cast<std::vector<i64>>();
  q.samples.reserve(lengths.size());
  const py::object shapes = workload.attr("shapes");
  if (q.profile.pairs == mdcp::Pairs::grid) {
    const auto rows = shapes.cast<std::vector<std::tuple<i64, i64, i64>>>();
    for (size_t j = 0; j < lengths.size(); ++j) {
      const auto [f, h, w] = rows[j];
      q.samples.push_back(mdcp::sample_pack(q.profile.pairs, lengths[j], f, h * w));
    }
  } else {
    for (i64 n : lengths) q.samples.push_back(mdcp::sample_pack(q.profile.pairs, n, 0, 0));
  }
  return q;
}

py::list placements_of(const mdcp::Plan& plan) {
  py::list out;
  for (const mdcp::Placement& p : plan.placements)
    out.append(py::make_tuple(p.slot, p.first, p.degree, py::cast(p.samples),
                              mdcp::scheme_name(p.mode.scheme), p.mode.inner, p.recompute,
                              p.time_us, p.bytes));
  return out;
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "The planner of megatron-dcp: single thread, no torch, a function of its request only.";
  py::register_exception<mdcp::PlanFailure>(m, "PlanFailure", PyExc_ValueError);

  py::class_<mdcp::Plan>(m, "Plan")
      .def_property_readonly("placements", placements_of,
                             "(slot, first_rank, degree, samples, scheme, inner_degree, recompute, "
                             "time_us, bytes) per placement, in execution order")
      .def_readonly("algorithm", &mdcp::Plan::algorithm)
      .def_readonly("makespan_us", &mdcp::Plan::makespan_us)
      .def_readonly("lower_bound_us", &mdcp::Plan::lower_bound_us);

  m.def("plan", [](const py::object& request) {
    const mdcp::Request q = read_request(request);
    py::gil_scoped_release release;
    return mdcp::make_plan(q);
  });
  m.def("lower_bound_us", [](const py::object& request) {
    const mdcp::Request q = read_request(request);
    py::gil_scoped_release release;
    const mdcp::Table table(q);
    table.require_feasible();
    return mdcp::lower_bound(table).us;
  });
}
