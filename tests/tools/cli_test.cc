// engine_cli plan, info, bench and calibrate; bad input; outputs.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "tests/tools/cli_harness.h"

namespace mla::test {
namespace {

using nlohmann::json;
using Ints = std::vector<int>;

json plan(const std::string& options) {
  const CliResult result = run_cli("plan --backend cpu --json - " + options);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result.json();
}

/// `head`, then ",tail" so many times.
std::string repeat(const std::string& head, const std::string& tail, int times) {
  std::string text = head;
  for (int i = 0; i < times; ++i) text += "," + tail;
  return text;
}

TEST(CliPlanTest, OneLongContextAndManyShortOnesMakeOneChunk) {
  const json p = plan("--query-lens " + repeat("513", "513", 31) + " --context-lens " +
                      repeat("60000", "16", 31) + " --workspace-tokens 65536 --path expand");
  EXPECT_EQ(p["num_chunks"], 1);
  EXPECT_EQ(p["schedule"], "packed");
  EXPECT_EQ(p["workspace_tokens"], 65536);
  EXPECT_EQ(p["chunks"][0]["seq_tot"], 60496);
  EXPECT_EQ(p["chunks"][0]["has_empty_context"], false);
}

TEST(CliPlanTest, WordsOfTheJson) {
  const json p =
      plan("--query-lens 64,17,1 --context-lens 10240,0,512 --workspace-tokens 4096 --path expand");
  EXPECT_EQ(p["num_chunks"], 3);
  ASSERT_EQ(p["chunks"].size(), 3u);
  const json& last = p["chunks"][2];
  EXPECT_EQ(keys_of(last), (std::vector<std::string>{
                               "cu_seq_lens", "has_empty_context", "max_seq_len", "owner", "path",
                               "request_begin", "request_end", "seq_lens", "seq_tot", "starts"}));
  EXPECT_EQ(last["request_begin"], 0);
  EXPECT_EQ(last["request_end"], 3);
  EXPECT_EQ(last["starts"], (Ints{8192, 0, 0}));
  EXPECT_EQ(last["seq_lens"], (Ints{2048, 0, 512}));
  EXPECT_EQ(last["cu_seq_lens"], (Ints{0, 2048, 2048, 2560}));
  EXPECT_EQ(last["seq_tot"], 2560);
  EXPECT_EQ(last["max_seq_len"], 2048);
  EXPECT_EQ(last["has_empty_context"], true);
  EXPECT_EQ(last["path"], "expand");
  EXPECT_TRUE(last["owner"].is_null());
  EXPECT_EQ(keys_of(p["cp"]),
            (std::vector<std::string>{"hash", "load", "rank_rows", "reasons", "strategy"}));
  EXPECT_EQ(p["cp"]["rank_rows"], (Ints{10752}));
  EXPECT_EQ(p["cp"]["load"], 1.0);
  EXPECT_EQ(p["cp"]["strategy"], "none");
}

TEST(CliPlanTest, UniformScheduleLeavesRequestsWithoutKeys) {
  const json p = plan(
      "--query-lens 1,1 --context-lens 1000,50 --workspace-tokens 512 --page-size 64 "
      "--schedule uniform --path expand");
  ASSERT_EQ(p["num_chunks"], 4);  // 256 positions of each
  for (int c = 0; c < 4; ++c) EXPECT_EQ(p["chunks"][c]["has_empty_context"], c > 0) << c;
}

TEST(CliPlanTest, LocalListsOfAShardedCache) {
  const json seven = plan("--query-lens " + repeat("33", "33", 6) + " --context-lens " +
                          repeat("12345", "12345", 6) + " --cp 8 --cp-strategy merge_partials");
  int64_t total = 0;
  for (const json& chunk : seven["chunks"]) {
    ASSERT_EQ(chunk["local_seq_lens"].size(), 8u);
    ASSERT_EQ(chunk["local_has_empty_context"].size(), 8u);
    total += chunk["seq_tot"].get<int64_t>();
  }
  EXPECT_EQ(total, 7 * 12345);
  EXPECT_LE(seven["cp"]["load"], 1.001);
  EXPECT_EQ(seven["cp"]["rank_rows"],
            (Ints{7 * 1544, 7 * 1543, 7 * 1543, 7 * 1543, 7 * 1543, 7 * 1543, 7 * 1543, 7 * 1543}));

  const json two = plan(
      "--query-lens 33,33 --context-lens 1000,50 --cp 4 --cp-interleave 64 --page-size 64 "
      "--cp-strategy merge_partials");
  ASSERT_EQ(two["num_chunks"], 1);
  const json& chunk = two["chunks"][0];
  EXPECT_EQ(chunk["seq_lens"], (Ints{1000, 50}));
  EXPECT_EQ(chunk["local_seq_lens"],
            json({Ints{256, 50}, Ints{256, 0}, Ints{256, 0}, Ints{232, 0}}));
  EXPECT_EQ(chunk["local_has_empty_context"], json({false, true, true, true}));
  EXPECT_EQ(chunk["has_empty_context"], false);
  EXPECT_TRUE(chunk["owner"].is_null());
  EXPECT_EQ(two["cp"]["strategy"], "merge_partials");

  // Where latent rows travel, a chunk is the whole context's and ranks send the same parts of it.
  const json gathered = plan(
      "--query-lens 33,33 --context-lens 1000,50 --cp 4 --cp-interleave 64 --page-size 64 "
      "--cp-strategy gather_kv --cp-queries split");
  ASSERT_EQ(gathered["num_chunks"], 1);
  EXPECT_EQ(gathered["chunks"][0]["seq_lens"], (Ints{1000, 50}));
  EXPECT_EQ(gathered["chunks"][0]["local_seq_lens"], chunk["local_seq_lens"]);
  EXPECT_EQ(gathered["cp"]["strategy"], "gather_kv");
  EXPECT_NE(gathered["cp"]["hash"], two["cp"]["hash"]);
}

TEST(CliPlanTest, OwnersOfAReplicatedCache) {
  const std::string ways = "--cp 8 --cp-placement replicated --cp-strategy merge_partials ";
  const json equal = plan(ways + "--query-lens " + repeat("512", "512", 7) + " --context-lens " +
                          repeat("20000", "20000", 7));
  EXPECT_LE(equal["cp"]["load"], 1.05);
  std::vector<bool> owns(8, false);
  for (const json& chunk : equal["chunks"]) {
    const int owner = chunk["owner"];
    owns[owner] = true;
    for (int rank = 0; rank < 8; ++rank) {
      const Ints none(chunk["seq_lens"].size(), 0);
      EXPECT_EQ(chunk["local_seq_lens"][rank], rank == owner ? chunk["seq_lens"] : json(none));
      if (rank == owner) continue;
      EXPECT_EQ(chunk["local_has_empty_context"][rank], true);
    }
  }
  EXPECT_EQ(owns, std::vector<bool>(8, true));
  EXPECT_LE(plan(ways + "--query-lens 2048 --context-lens 131072")["cp"]["load"], 1.15);
}

TEST(CliPlanTest, SimulationOfMoreRanks) {
  const std::string batch =
      "--query-lens 2048 --context-lens 1000000 --cp 16 --cp-strategy merge_partials --simulate "
      "--cp-link-gbps 1e9 --cp-nic-gbps 1e9 --cp-latency-us 1e-6 --model deepseek-v3 ";
  const json steps = plan(batch)["simulation"];
  ASSERT_EQ(steps.size(), 5u);
  // With exchanges for nothing, ranks but for the new tokens share the work.
  const double alone = steps[0]["step_ms"];
  for (size_t i = 0; i < steps.size(); ++i) {
    const int ranks = 1 << i;
    EXPECT_EQ(steps[i]["ranks"], ranks);
    EXPECT_GT(steps[i]["speedup"], 0.9 * ranks);
    EXPECT_LE(steps[i]["speedup"], 1.001 * ranks);
    EXPECT_LT(steps[i]["load"], 1.05);
  }
  // 2 H (L (P + V) rows + (P + Rr + V) scores) FLOPs of the context and of the new tokens.
  const double rows = 1000000.0 + 2048, scores = 2048 * 1000000.0 + 2048 * 2049 / 2.0;
  const double flops = 2.0 * 128 * (512 * 256 * rows + 320 * scores);
  EXPECT_NEAR(alone, flops / 600e12 * 1e3, 1e-3 * alone);
  // Ranks of other nodes send over the NIC.
  const std::string slow =
      "--query-lens 2048 --context-lens 1000000 --cp 16 --cp-strategy "
      "merge_partials --simulate --model deepseek-v3 ";
  const json nodes = plan(slow)["simulation"];
  const json one_node = plan(slow + "--cp-ranks-per-node 16")["simulation"];
  EXPECT_EQ(nodes[3]["exchange_ms"], one_node[3]["exchange_ms"]);
  EXPECT_GT(nodes[4]["exchange_ms"], 2 * one_node[4]["exchange_ms"].get<double>());
  EXPECT_TRUE(plan("--query-lens 3 --cp 2")["simulation"].is_null());
}

TEST(CliPlanTest, AutoFollowsTheRatesAndSaysWhy) {
  const std::string batch = "--query-lens 32768 --context-lens 4096 --cp 8 --cp-queries split ";
  const json slow = plan(batch);
  EXPECT_EQ(slow["cp"]["strategy"], "gather_kv");
  EXPECT_EQ(slow["cp"]["reasons"].size(), 3u);
  EXPECT_EQ(plan(batch + "--cp-link-gbps 1e9 --cp-latency-us 1e-6")["cp"]["strategy"],
            "merge_partials");
}

TEST(CliPlanTest, PlansAStepOfMany) {
  const std::string batch = "--requests 3 --prompt-lens 100 --max-num-batched-tokens 64 ";
  EXPECT_EQ(plan(batch)["num_chunks"], 0);
  const json p = plan(batch + "--step 1 --path expand");
  EXPECT_EQ(p["num_steps"], 5);
  EXPECT_EQ(p["chunks"][0]["seq_lens"], Ints{64});
}

TEST(CliPlanTest, PeopleSeeWhichContextIsInWhichChunk) {
  const CliResult few = run_cli(
      "plan --backend cpu --query-lens 64,17,1 --context-lens 10240,0,512 --workspace-tokens 4096");
  EXPECT_NE(few.out.find("4096..8191"), std::string::npos) << few.out;
  const CliResult many = run_cli(
      "plan --backend cpu --query-lens 64,17,1 --context-lens 1024,0,64 --workspace-tokens 64 "
      "--path expand");
  EXPECT_NE(many.out.find("++++++++++++++++."), std::string::npos) << many.out;
  EXPECT_NE(many.out.find("................#"), std::string::npos) << many.out;
}

TEST(CliInfoTest, WordsAndExactBytes) {
  const CliResult result = run_cli(
      "info --backend cpu --model deepseek-v2-lite --workspace-tokens 4096 "
      "--max-num-batched-tokens 2048 --merge discrete --path expand --commit abc --json -");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json info = result.json();
  EXPECT_EQ(info["model"], "deepseek-v2-lite");
  EXPECT_EQ(info["dims"], json({{"num_heads", 16},
                                {"qk_nope_head_dim", 128},
                                {"qk_rope_head_dim", 64},
                                {"v_head_dim", 128},
                                {"kv_lora_rank", 512}}));
  EXPECT_EQ(info["kv_cache_row_bytes"], 1152);
  EXPECT_EQ(info["backend"], "cpu");
  EXPECT_EQ(info["commit"], "abc");
  const json& bytes = info["workspace_bytes"];
  EXPECT_EQ(bytes["latent"], 4096 * 576 * 2);
  EXPECT_EQ(bytes["expanded"], 4096 * 16 * 256 * 2);
  EXPECT_EQ(bytes["partial_out"], 2048 * 16 * 128 * 4);
  EXPECT_EQ(bytes["partial_lse"], 2048 * 16 * 4);
  EXPECT_EQ(bytes["chunk_out"], bytes["partial_out"]);
  int64_t sum = 0;
  for (const auto& [part, size] : bytes.items()) {
    if (part != "total") sum += size.get<int64_t>();
  }
  EXPECT_EQ(bytes["total"], sum);
  EXPECT_FALSE(info["attention_kernel"]["expand"].get<std::string>().empty());
}

TEST(CliBenchTest, ChecksThenTimes) {
  const CliResult result = run_cli(
      "bench --backend cpu --seconds 0.001 --query-lens 9,1 --context-lens 100,30 --commit abc "
      "--workspace-tokens 64 --page-size 16 --json -" +
      kSmallModel);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const json bench = result.json();
  EXPECT_EQ(bench["commit"], "abc");
  EXPECT_TRUE(bench["driver"].is_null());
  EXPECT_TRUE(bench["device"].is_string());
  EXPECT_GE(bench["results"].size(), 7u);
  for (const json& entry : bench["results"]) {
    EXPECT_EQ(keys_of(entry), (std::vector<std::string>{"floor_fraction", "gbps", "ms", "name",
                                                        "peer_ratio", "shape", "tflops"}));
    EXPECT_GT(entry["ms"], 0.0) << entry;
    EXPECT_TRUE(entry["floor_fraction"].is_null());
    EXPECT_TRUE(entry["peer_ratio"].is_null());
  }
}

TEST(CliCalibrateTest, GivesRates) {
  const json rates =
      run_cli("calibrate --backend cpu --seconds 0.001 --json -" + kSmallModel).json();
  for (const char* word :
       {"expand_flops_per_second", "attention_flops_per_second",
        "absorb_attention_flops_per_second", "gather_bytes_per_second", "merge_bytes_per_second"}) {
    EXPECT_GT(rates[word], 0.0) << word;
  }
}

// 4,200 rows by 64,000 keys are just above 2^28 scores.
TEST(CliVerifyTest, LargeStepsAreSampled) {
  const CliResult result = run_cli(
      "run --backend cpu --heads 1 --nope 8 --rope 8 --vdim 8 --lora 8 --query-lens 4200,40 "
      "--context-lens 64000,10 --workspace-tokens 65536 --path expand --verify --json -");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const int64_t checked = result.json()["verify"]["checked_rows"];
  EXPECT_GT(checked, 40 + 50);
  EXPECT_LE(checked, 40 + 64 + 4);
}

TEST(CliHelpTest, EveryCommandHasExamples) {
  EXPECT_EQ(run_cli("--help").exit_code, 0);
  for (const std::string command : {"run", "plan", "info", "bench", "calibrate"}) {
    const CliResult result = run_cli(command + " --help");
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("  engine_cli " + command), std::string::npos) << command;
  }
}

struct BadInput {
  const char* line;
  const char* message;  // a part: the value and the limit
  int exit_code = 2;
};

void PrintTo(const BadInput& input, std::ostream* out) { *out << input.line; }

class CliBadInputTest : public testing::TestWithParam<BadInput> {};

TEST_P(CliBadInputTest, OneClearLineAndItsExitCode) {
  const CliResult result = run_cli(GetParam().line);
  EXPECT_EQ(result.exit_code, GetParam().exit_code);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find(GetParam().message), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
}

INSTANTIATE_TEST_SUITE_P(
    All, CliBadInputTest,
    testing::Values(
        BadInput{"", "subcommand"}, BadInput{"frob", "subcommand"}, BadInput{"run", "no batch"},
        BadInput{"plan", "no batch"}, BadInput{"run --query-lens 1 --frob", "--frob"},
        BadInput{"run --query-lens 1,2 --context-lens 1", "2 lengths and --context-lens 1"},
        BadInput{"run --context-lens 1", "needs --query-lens"},
        BadInput{"run --query-lens 1 --requests 2", "exclude"},
        BadInput{"run --query-lens -1", "-1; it must be from 0"},
        BadInput{"run --query-lens 1 --context-lens -5", "-5; it must be from 0"},
        BadInput{"run --query-lens 1,x", "'x'"}, BadInput{"run --query-lens 1,", "comma"},
        BadInput{"run --query-lens 3000000000", "3000000000; it must be from 0 to 2147483647"},
        BadInput{"run --query-lens 99999999999999999999",
                 "99999999999999999999; it must be from 0 to 2147483647"},
        BadInput{"run --query-lens 1 --threads ''", "--threads: '' is no whole number"},
        BadInput{"run --query-lens 1 --softmax-scale ''", "--softmax-scale: '' is no number"},
        BadInput{"run --query-lens 1 --softmax-scale 1e999", "'1e999' is out of range"},
        BadInput{"run --query-lens 1 --layers 0x10", "'0x10' is no whole number"},
        BadInput{"run --query-lens 1 --seed -1", "'-1' is no whole number from 0"},
        BadInput{"run --query-lens 1 --seed 18446744073709551616",
                 "18446744073709551616; it must be from 0 to 18446744073709551615"},
        BadInput{"bench --seconds 1e300", "1e300; it must be above 0, and 3600 at most"},
        BadInput{"run --query-lens 1,1 --context-lens 2147483646,5", "limit is 2147483647"},
        BadInput{"run --requests -1", "-1; it must be from 0"},
        BadInput{"run --requests 2 --prompt-lens 9:3", "9:3"},
        BadInput{"run --requests 2 --prompt-lens 2147483647 --prefix-lens 9", "2147483656"},
        BadInput{"run --requests 2 --max-num-batched-tokens 0", "0; it must be from 1"},
        BadInput{"run --requests 9999 --prompt-lens 9999 --max-num-batched-tokens 1", "steps"},
        BadInput{"run --query-lens 1 --model gpt-2", "'gpt-2'; known: "},
        BadInput{"run --query-lens 1 --kv-cache-dtype int8", "'int8'; known: bf16"},
        BadInput{"run --query-lens 1 --kv-cache-dtype fp8_ds_mla --lora 256", "256"},
        BadInput{"run --query-lens 1 --kv-cache-scale 0", "0; it must be finite and above 0"},
        BadInput{"run --query-lens 1 --schedule frob", "'frob'; known: packed"},
        BadInput{"run --query-lens 1 --path frob", "'frob'; known: auto"},
        BadInput{"run --query-lens 1 --merge frob", "'frob'"},
        BadInput{"run --query-lens 1 --backend tpu", "tpu"},
        BadInput{"run --query-lens 1 --workspace-tokens 32", "32; one page, 64 tokens"},
        BadInput{"run --query-lens 1 --workspace-tokens -4", "-4; it must be from 1"},
        BadInput{"run --query-lens 1 --page-size 0", "0; it must be from 1"},
        BadInput{"run --query-lens 1 --split-tokens 100", "100; it must be a multiple"},
        BadInput{"run --query-lens 1 --heads 0", "--heads is 0; it must be from 1"},
        BadInput{"run --query-lens 1 --nope 20", "20; it must be a multiple of 8"},
        BadInput{"run --query-lens 1 --vdim 2048", "2048; it must be a multiple of 8 from 8 to"},
        BadInput{"run --query-lens 1 --softmax-scale nan", "nan; it must be finite"},
        BadInput{"run --query-lens 1 --softmax-scale -1", "-1; it must be finite"},
        BadInput{"run --query-lens 1 --softmax-scale 0", "0; it must be finite"},
        BadInput{"run --query-lens 1 --layers 0", "0; it must be from 1"},
        BadInput{"run --query-lens 1 --threads 9999", "9999; it must be from 0 to 1024"},
        BadInput{"run --query-lens 1 --json /nonexistent/x", "'/nonexistent/x'"},
        BadInput{"run --query-lens 1 --trace /nonexistent/x", "'/nonexistent/x'"},
        BadInput{"plan --query-lens 1 --trace /tmp/x", "--trace is for run"},
        BadInput{"run --query-lens 1 --json ''", "--json: the file's name is empty"},
        BadInput{"run --query-lens 1 --trace ''", "--trace: the file's name is empty"},
        BadInput{"run --query-lens 1 --trace -", "only --json writes to stdout"},
        BadInput{"plan --backend cpu --query-lens 1 --context-lens 2147483646 --page-size 1 "
                 "--workspace-tokens 1",
                 "more than 1048576 chunks"},
        BadInput{"plan --backend cpu --query-lens 2147483647 --page-size 1 --workspace-tokens 1",
                 "more than 1048576 chunks"},
        BadInput{"plan --backend cpu --query-lens 1 --context-lens 2000000000 --page-size 1 "
                 "--workspace-tokens 64 --cp 1024",
                 "entries"},
        BadInput{"calibrate --backend cpu --heads 1024 --nope 1024 --vdim 1024 --lora 1024 "
                 "--page-size 2147483647 --workspace-tokens 2147483647",
                 "GiB of memory, the machine has"},
        BadInput{"run --backend cpu --query-lens 1 --context-lens 2000000000 --layers 999",
                 "GiB of memory, the machine has"},
        BadInput{"plan --query-lens 1 --requests-typo 2", "--requests-typo"},
        BadInput{"plan --requests 2 --step 7", "--step is 7, the batch has"},
        BadInput{"bench --cp 2", "--cp 2 (context parallelism) beside plan and run is not"},
        BadInput{"run --query-lens 1 --cp 2 --backend cuda", "--cp 2 with --backend cuda is not"},
        BadInput{"run --query-lens 1 --cp 2 --path absorb", "--path absorb is not served"},
        BadInput{"run --query-lens 1 --cp 65", "--cp is 65, the limit is 64"},
        BadInput{"plan --query-lens 1 --cp 2 --cp-link-gbps 0", "--cp-link-gbps is 0"},
        BadInput{"run --query-lens 1 --cp 0", "--cp is 0; it must be from 1"},
        BadInput{"run --query-lens 1 --cp-spawn", "--cp-spawn is not available in this build"},
        BadInput{"run --query-lens 1 --simulate", "--simulate is for plan"},
        BadInput{"plan --query-lens 1 --cp 2 --cp-ranks-per-node 0", "--cp-ranks-per-node is 0"},
        BadInput{"plan --query-lens 1 --cp 2 --cp-interleave 0", "0; it must be from 1"}));

TEST(CliOutputTest, CudaByNameWithoutADeviceIsADeviceFailure) {
  if (run_cli("info --backend cuda").exit_code == 0) GTEST_SKIP() << "there is a CUDA device";
  const CliResult result = run_cli("run --query-lens 1 --backend cuda --json -" + kSmallModel);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.json()["status"], "error");
}

TEST(CliOutputTest, AFailedRunSaysSoInItsJson) {
  const CliResult result = run_cli("run --query-lens 1 --heads 0 --json -");
  EXPECT_EQ(result.exit_code, 2);
  const json run = result.json();
  EXPECT_EQ(run["status"], "error");
  EXPECT_TRUE(run["verify"].is_null());
  EXPECT_EQ("engine_cli: " + run["error"].get<std::string>() + "\n", result.err);
}

TEST(CliOutputTest, WordsThatAreNotUtf8StandInJson) {
  const CliResult failed = run_cli("run --query-lens 1 --model \xff --json -");
  EXPECT_EQ(failed.exit_code, 2);
  EXPECT_EQ(failed.json()["status"], "error");
  const CliResult info = run_cli("info --backend cpu --commit a\xff --json -");
  EXPECT_EQ(info.exit_code, 0) << info.err;
  EXPECT_EQ(info.json()["commit"], "a\uFFFD");
}

TEST(CliOutputTest, NamesTooLongForAFileAreBadInput) {
  const CliResult result = run_cli("run --query-lens 1 --json " + std::string(5000, 'x'));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("can't write 'xxx"), std::string::npos) << result.err;
}

TEST(CliOutputTest, OneFileForJsonAndTraceIsRefused) {
  const TempFile file;
  const CliResult result = run_cli("run --backend cpu --query-lens 3 --json " + file.path() +
                                   " --trace /." + file.path() + kSmallModel);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("--json and --trace are both"), std::string::npos) << result.err;
}

TEST(CliOutputTest, TheOracleIsPartOfTheMemoryThatARunNeeds) {
  const std::string line =
      "run --backend cpu --heads 1 --nope 8 --rope 8 --vdim 8 --lora 8 --page-size 64 "
      "--kv-cache-dtype fp8_e4m3 --query-lens 1 --context-lens ";
  const auto needed = [&](const std::string& options) {
    const std::string err = run_cli(line + "2000000000 --layers 999" + options).err;
    const size_t at = err.find("needs ");
    EXPECT_NE(at, std::string::npos) << err;
    return at == std::string::npos ? 0.0 : std::stod(err.substr(at + 6));
  };
  const double keys = 2e9 * (16 + 16) * 4 / 0x1p30;  // latent rows, and one head's keys and values
  EXPECT_GT(needed(" --verify"), needed("") + keys);
}

TEST(CliOutputTest, JsonGoesToAFileBesideTheTable) {
  const TempFile file;
  const CliResult result =
      run_cli("run --backend cpu --query-lens 3 --json " + file.path() + kSmallModel);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("tokens/s"), std::string::npos);
  EXPECT_EQ(json::parse(file.content())["status"], "ok");
}

TEST(CliOutputTest, RefusedCommandsLeaveFilesAsTheyWere) {
  const TempFile old_file;
  old_file.write("kept");
  EXPECT_EQ(run_cli("plan --requests 2 --step 7 --json " + old_file.path()).exit_code, 2);
  EXPECT_EQ(old_file.content(), "kept");
  const TempFile new_file;
  EXPECT_EQ(run_cli("plan --requests 2 --step 7 --json " + new_file.path()).exit_code, 2);
  EXPECT_FALSE(new_file.exists());
}

}  // namespace
}  // namespace mla::test
