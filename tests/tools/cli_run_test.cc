// engine_cli run: right answers, the words of its JSON, its trace, and that verification can fail.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "tests/support/mutant_backend.h"
#include "tests/tools/cli_harness.h"

namespace mla::test {
namespace {

using nlohmann::json;

const std::string kUneven =
    "run --backend cpu --query-lens 9,5,0,1 --context-lens 130,0,3,33 --workspace-tokens 48 "
    "--page-size 16 --verify --json -" +
    kSmallModel;

void expect_ok(const std::string& line) {
  SCOPED_TRACE(line);
  const CliResult result = run_cli(line);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  const json run = result.json();
  EXPECT_EQ(run["status"], "ok");
  EXPECT_TRUE(run["verify"]["ok"]);
}

TEST(CliRunTest, EveryScheduleFormatPathAndMergeGivesRightResults) {
  int seed = 0;
  for (const char* schedule : {"packed", "uniform", "fixed"}) {
    for (const char* format : {"bf16", "fp8_e4m3"}) {
      for (const char* path : {"auto", "expand", "absorb"}) {
        for (const char* merge : {"fused", "discrete"}) {
          expect_ok(kUneven + " --schedule " + schedule + " --kv-cache-dtype " + format +
                    " --path " + path + " --merge " + merge + " --seed " + std::to_string(seed++));
        }
      }
    }
  }
}

TEST(CliRunTest, BlockScaledCacheGivesRightResults) {
  expect_ok(
      "run --backend cpu --heads 2 --query-lens 9,5 --context-lens 130,33 --workspace-tokens 64 "
      "--page-size 16 --kv-cache-dtype fp8_ds_mla --layers 2 --verify --json -");
}

TEST(CliRunTest, ManyStepsOverManyLayers) {
  const CliResult result = run_cli(
      "run --backend cpu --requests 5 --prompt-lens 10:90 --prefix-lens 0:40 --seed 7 "
      "--max-num-batched-tokens 64 --workspace-tokens 48 --page-size 16 --layers 3 --verify "
      "--json -" +
      kSmallModel);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json run = result.json();
  const size_t num_steps = run["steps"].size();
  EXPECT_GT(num_steps, 2u);
  int64_t query_tokens = 0;
  int64_t context_tokens = 0;
  for (size_t s = 0; s < num_steps; ++s) {
    const json& step = run["steps"][s];
    if (s + 1 < num_steps) {
      EXPECT_EQ(step["query_tokens"], 64);
    }
    query_tokens += step["query_tokens"].get<int64_t>();
    context_tokens += step["context_tokens"].get<int64_t>();
  }
  EXPECT_EQ(run["totals"]["query_tokens"], query_tokens);
  EXPECT_EQ(run["totals"]["context_tokens"], context_tokens);
  EXPECT_GT(context_tokens, 0);
  EXPECT_EQ(run["verify"]["checked_rows"], 3 * query_tokens);
}

TEST(CliRunTest, ThreadsAsRanksGiveRightResults) {
  const std::string line =
      "run --backend cpu --requests 4 --prompt-lens 0:30 --prefix-lens 0:90 "
      "--max-num-batched-tokens 24 --workspace-tokens 48 --page-size 16 --layers 2 --verify "
      "--json - --cp-interleave 16" +
      kSmallModel;
  int seed = 0;
  for (const char* placement : {"sharded", "replicated"}) {
    for (const char* queries : {"replicated", "split"}) {
      for (const char* strategy : {"gather_kv", "merge_partials", "auto"}) {
        for (const char* schedule : {"packed", "uniform", "fixed"}) {
          expect_ok(line + " --cp " + std::to_string(2 + seed % 3) + " --cp-placement " +
                    placement + " --cp-queries " + queries + " --cp-strategy " + strategy +
                    " --schedule " + schedule + (seed % 2 == 0 ? " --merge discrete" : "") +
                    " --seed " + std::to_string(seed));
          ++seed;
        }
      }
    }
  }
}

TEST(CliRunTest, RanksReportTheWholeStep) {
  const json alone = run_cli(kUneven + " --path expand").json();
  const json ranks = run_cli(kUneven + " --cp 3").json();
  for (const char* word : {"query_tokens", "context_tokens"}) {
    EXPECT_EQ(ranks["totals"][word], alone["totals"][word]);
    EXPECT_EQ(ranks["steps"][0][word], alone["steps"][0][word]);
  }
  EXPECT_EQ(ranks["verify"]["checked_rows"], alone["verify"]["checked_rows"]);
}

TEST(CliRunTest, SameSeedSameErrors) {
  EXPECT_EQ(run_cli(kUneven).json()["verify"], run_cli(kUneven).json()["verify"]);
  EXPECT_NE(run_cli(kUneven).json()["verify"], run_cli(kUneven + " --seed 1").json()["verify"]);
}

TEST(CliRunTest, WordsOfTheJson) {
  const json run = run_cli(kUneven).json();
  EXPECT_EQ(run["backend"], "cpu");
  EXPECT_EQ(run["model"], "custom");
  ASSERT_EQ(run["steps"].size(), 1u);
  const json& step = run["steps"][0];
  EXPECT_EQ(keys_of(step),
            (std::vector<std::string>{"chunks", "context_tokens", "ms", "query_tokens"}));
  EXPECT_EQ(step["query_tokens"], 15);
  EXPECT_EQ(step["context_tokens"], 166);
  EXPECT_GT(step["chunks"], 2);
  EXPECT_GT(step["ms"], 0.0);
  EXPECT_EQ(keys_of(run["totals"]),
            (std::vector<std::string>{"context_tokens", "query_tokens", "seconds", "tflops",
                                      "tokens_per_second"}));
  for (const char* word : {"checked_rows", "max_abs_err", "rel_err", "lse_max_abs_err", "ok"}) {
    EXPECT_TRUE(run["verify"].contains(word)) << word;
  }
  EXPECT_EQ(run["verify"]["checked_rows"], 15);
  EXPECT_GT(run["verify"]["rel_err"], 0.0);
  EXPECT_LT(run["verify"]["rel_err"], 5e-3);
}

TEST(CliRunTest, FlopsFollowTheDefinitionOfAttention) {
  const json totals = run_cli(kUneven).json()["totals"];
  // sum q context + sum q (q + 1) / 2, twice, by heads and by P + Rr + V
  const double scores = 9 * 130 + 1 * 33 + (9 * 10 + 5 * 6 + 1 * 2) / 2.0;
  const double flops = 2.0 * 3 * (24 + 8 + 16) * scores;
  const double found = totals["tflops"].get<double>() * totals["seconds"].get<double>() * 1e12;
  EXPECT_NEAR(found, flops, 1e-6 * flops);
}

TEST(CliRunTest, VerifyIsNullUnlessAskedFor) {
  const json run = run_cli("run --backend cpu --query-lens 3 --json -" + kSmallModel).json();
  EXPECT_TRUE(run["verify"].is_null());
  EXPECT_EQ(run["status"], "ok");
}

TEST(CliRunTest, EmptyBatchesAreLegal) {
  for (const char* batch : {"--query-lens ''", "--query-lens '' --context-lens ''", "--requests 0",
                            "--query-lens 0,0 --context-lens 0,70"}) {
    SCOPED_TRACE(batch);
    const CliResult result =
        run_cli("run --backend cpu --verify --json - " + std::string(batch) + kSmallModel);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.json()["totals"]["query_tokens"], 0);
    EXPECT_EQ(result.json()["verify"]["checked_rows"], 0);
    EXPECT_EQ(result.json()["status"], "ok");
  }
}

TEST(CliRunTest, PeopleSeeATable) {
  const CliResult result = run_cli("run --backend cpu --query-lens 3 --verify" + kSmallModel);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_NE(result.out.find("new tokens"), std::string::npos);
  EXPECT_NE(result.out.find("verified 3 rows against float64: ok"), std::string::npos);
}

// ---- Verification can fail ----

cli::BackendDecorator mutant(const std::string& name) {
  return [name](std::unique_ptr<Backend> backend) {
    return make_mutant_backend(std::move(backend), name);
  };
}

void expect_verify_failed(const CliResult& result) {
  EXPECT_EQ(result.exit_code, 1);
  const json run = result.json();
  EXPECT_EQ(run["status"], "verify_failed");
  EXPECT_FALSE(run["verify"]["ok"]);
}

TEST(CliVerifyTest, WrongMergesAreFound) {
  const std::string line = kUneven + " --merge discrete --path expand";
  expect_ok(line);
  expect_verify_failed(run_cli(line, mutant("base2_lse")));
}

TEST(CliVerifyTest, RowsThatNobodyMaskedAreFound) {
  const std::string line = kUneven + " --merge discrete --path expand --schedule uniform";
  expect_ok(line);
  expect_verify_failed(run_cli(line, mutant("mask_off")));
  const std::string ranks = line + " --cp 2 --cp-strategy merge_partials";
  expect_ok(ranks);
  expect_verify_failed(run_cli(ranks, mutant("mask_off")));
}

/// Adds a little to one value of what an op wrote.
class OneWrongValue final : public ForwardingBackend {
 public:
  enum class Where { kOut, kLse, kExpansion };
  OneWrongValue(std::unique_ptr<Backend> backend, Where where)
      : ForwardingBackend(std::move(backend)), where_(where) {}

  void prefill_attention(const PrefillAttentionParams& params, const OpContext& context) override {
    backend_.prefill_attention(params, context);
    if (params.out.dtype == DType::kFloat32) return;  // not the layer's output
    // Row 14 is the only one of the last request.
    if (where_ == Where::kOut) {
      uint16_t* const row = static_cast<uint16_t*>(params.out.data) + 14 * params.out.row_stride;
      for (int i = 0; i < 4; ++i) row[i] ^= 0x8000;
    } else if (where_ == Where::kLse) {
      params.lse.data[14 * params.lse.row_stride] *= 1.01f;
    }
  }
  void expand(const ExpandParams& params, const OpContext& context) override {
    backend_.expand(params, context);
    if (where_ != Where::kExpansion) return;
    // Every other value is one bf16 step off.
    auto* const values = static_cast<uint16_t*>(params.expanded.data);
    const int64_t columns = int64_t{params.dims.num_heads} * params.dims.kv_head_dim();
    for (int64_t row = 0; row < params.num_rows.capacity; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        if ((row + c) % 2 == 0) values[row * params.expanded.row_stride + c] += 1;
      }
    }
  }

 private:
  Where where_;
};

TEST(CliVerifyTest, OneWrongRequestAmongManyIsFound) {
  for (const auto where :
       {OneWrongValue::Where::kOut, OneWrongValue::Where::kLse, OneWrongValue::Where::kExpansion}) {
    SCOPED_TRACE(static_cast<int>(where));
    expect_verify_failed(
        run_cli(kUneven + " --path expand", [where](std::unique_ptr<Backend> backend) {
          return std::make_unique<OneWrongValue>(std::move(backend), where);
        }));
  }
}

/// Leaves the output as it was.
class NoOutput final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void prefill_attention(const PrefillAttentionParams& params, const OpContext& context) override {
    if (params.out.dtype == DType::kFloat32) backend_.prefill_attention(params, context);
  }
};

TEST(CliVerifyTest, OutputThatNobodyWroteIsFound) {
  const CliResult result = run_cli(kUneven + " --path expand", [](std::unique_ptr<Backend> b) {
    return std::make_unique<NoOutput>(std::move(b));
  });
  expect_verify_failed(result);
  EXPECT_TRUE(result.json()["verify"]["rel_err"].is_null());  // NaN
}

// ---- Traces ----

TEST(CliTraceTest, SpansNestAndBalance) {
  const TempFile file;
  const CliResult result =
      run_cli(kUneven + " --path expand --merge discrete --layers 2 --trace " + file.path());
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.json()["status"], "ok");

  const json trace = json::parse(file.content());
  std::vector<json> open;
  double last_time = 0.0;
  std::map<std::string, std::set<std::string>> parents;  // categories around each category
  std::map<std::string, int> counts;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") continue;
    EXPECT_GE(event["ts"].get<double>(), last_time);
    last_time = event["ts"];
    if (event["ph"] == "B") {
      const std::string category = event["cat"];
      ++counts[category];
      ++counts[event["name"]];
      parents[category].insert(open.empty() ? "" : open.back()["cat"].get<std::string>());
      open.push_back(event);
    } else {
      ASSERT_EQ(event["ph"], "E");
      ASSERT_FALSE(open.empty());
      open.pop_back();
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(counts["step"], 1);
  EXPECT_EQ(counts["layer"], 2);
  EXPECT_EQ(counts["gather_latent"], 2 * result.json()["steps"][0]["chunks"].get<int>());
  EXPECT_EQ(counts["chunk 0"], 2);
  EXPECT_EQ(counts["new tokens 0"], 2);
  EXPECT_GT(counts["mask_empty_context"], 0);
  EXPECT_GT(counts["merge_attn_states"], 0);
  EXPECT_EQ(parents["layer"], std::set<std::string>{"step"});
  EXPECT_EQ(parents["chunk"], std::set<std::string>{"layer"});
  EXPECT_TRUE(parents["op"].count("chunk"));
}

}  // namespace
}  // namespace mla::test
