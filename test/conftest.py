"""Every test runs on the fork: pytest's `pythonpath` puts the clone's root first, so `import tinygrad` finds the overlay."""
import gc, os, re
import pytest

# a pool of one worker, begun anew every 16 kernels, is what tinygrad takes where pytest's workers have a core each: they compile themselves
if (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) < 2: os.environ.setdefault("PARALLEL", "0")

gc.set_threshold(50_000, 20, 20)   # graphs that are rewritten make objects by the million, few of them cycles: a seventh of the time went by here

try: import tinygrad
except ImportError as e: pytest.exit(f"{e}; `make test` sets everything up", returncode=2)
if not hasattr(tinygrad, "OVERLAY"):
  pytest.exit(f"expected the fork's tinygrad, found {tinygrad.__file__}: run pytest from the clone's root", returncode=2)

# What `make test` has no time for on two cores, and leaves out: `make test ARGS=--all` runs it too. Each repeats, on another target, type or size,
# what a test that stays proves of the same code.
SLOW = [
  # test_rows_of_the_table has all of these types, test_primitives and test_bits those that differ in what kernels do with them
  r"(test_cpu|test_msl|test_prefill|test_few_tokens|null/test_dequant_matvec)\.py::.*[\[-](IQ[123]_|TQ)",
  r"unit/test_quantized\.py::test_(uses\[(IQ[123]_|TQ)|bits\[(IQ[123]_(?!XS)|TQ)|looked_up_on_a_gpu\[(?!IQ1_M))",
  r"unit/test_oracle\.py::test_llama_cpp\[(IQ1_S|IQ2_|IQ3_XXS|TQ2_0)",
  r"null/test_primitives\.py::test_form\[mul_mat (IQ1_|IQ[23]_X|TQ).*-CUDA-",
  r"null/test_primitives\.py::test_form\[mul_mat (IQ1_M|IQ2_X|IQ3_|TQ1).*-CPU-",
  r"metal/test_decode\.py::test_the_tokens_of_the_cpu",                       # test_many's schedules run on METAL, and test_msl judges each kernel
  r"metal/test_msl\.py::test_the_choice_(and_its_gate_up\[[13]|in_groups\[1)",
  r"metal/test_msl\.py::test_(shapes|every_type)\[(Q5_0-16|Q8_0-33|Q4_0-17|Q[2345]_K|Q5_)",
  # test_primitives has every type on the mock of CUDA, and some on that of Metal
  r"null/test_mul_mat\.py::test_(every_type|a_matrix_a_head\[(IQ4_NL|BF16))",
  r"null/test_mul_mat\.py::test_shapes\[metal-",
  r"null/test_mul_mat\.py::test_shapes\[cuda-(Q4_0-16-2048|Q4_0-1-4128|Q4_0-5-(992|5120)|Q5_0-6-1408|Q6_K-3-1536|F16-3-(4128|12800)|Q8_0-3-2816)\]",
  r"null/test_prefill\.py::test_every_type\[(?!Q4_K|Q8_0)",
  r"null/test_prefill\.py::test_choice_in_groups\[.*256",
  r"null/test_few_tokens\.py::test_every_type\[(?!Q4_0|Q6_K)",
  r"null/test_few_tokens\.py::test_(groups\[64-8-384|experts\[(16|33|2-4-7-8)|gate_up_beside_the_router)",
  r"null/test_primitives\.py::test_as_alone\[.*-METAL-",
  r"null/test_primitives\.py::test_(form|as_alone)\[.*-CUDA-decode-(5|7|8|9|19)\]",   # columns that tensor cores take but on cards without them
  r"null/test_primitives\.py::test_form\[.*-CPU-cpu_few-(12|13)\]",
  r"null/test_primitives\.py::test_form\[(?!mul_mat).*-CPU-cpu_prefill-",         # test_cpu's tests of many
  r"null/test_primitives\.py::test_form\[.*-METAL-(decode-(2|3|4|5|8|9|19)|prefill-)",
  r"null/test_primitives\.py::test_form\[(cutoff|likeliest|log_total|tell) .*-(METAL|CPU-cpu_decode-7)",
  r"null/test_primitives\.py::test_form\[(norm_linear (34|96|rows that)|expert_down IQ4_NL|gate_up IQ4_XS).*-METAL-",
  r"null/test_primitives\.py::test_form\[mixture (.*-CUDA-prefill-|two tokens-CUDA-|few: .*-(9|16)\])",
  r"null/test_primitives\.py::test_form\[mul_mat (Q4_1|Q5_|Q2_K|Q3_K|IQ4_NL|MXFP4|BF16|F16).*-CPU-",
  r"null/test_primitives\.py::test_form\[((likeliest|log_total) .*-CUDA-decode-3|latent_attention ([35] heads at|8 bits).*-CUDA-prefill-)",
  r"null/test_primitives\.py::test_form\[mul_mat (?!Q4_0|Q6_K|MXFP4|a |id |many)[^-]*-METAL-",
  r"null/test_primitives\.py::test_form\[norm_linear rows that grow-CUDA-(decode|prefill)",
  r"null/test_primitives\.py::test_(choice_before_the_wait\[(two|in )|as_alone\[mixture two)",
  r"null/test_primitives\.py::test_form\[(mixture|expert_gate_up) in groups",
  r"null/test_architectures\.py::test_(rendered|forward)",
  r"null/test_attention\.py::test_tensor_cores\[shape([1-69]|10)-",
  r"null/test_attention\.py::test_few_blocks\[((0|1|15|63|127|400)-sm_86|(30|32)-)",
  r"null/test_attention\.py::test_new_rows_are_read_behind_the_wait\[((0|7|31|36)-1-|(0|60)-8-)",
  r"null/test_attention\.py::test_several_simt\[8-on_metal",
  r"null/test_attention\.py::test_several_by_tensor_cores\[(2-10|5-3)",
  r"null/test_attention\.py::test_rows_of_(several\[[39]|(several|a_prompt)\[.*on_metal)",
  r"null/test_cuda_decode\.py::test_decode",                                    # test_many's schedules run models on the mocks, too
  r"null/test_prefill\.py::test_(model|chunks_that_are_not_absorbed\[glm-sm_80)",   # test_many's schedules have prompts
  r"null/test_few_tokens\.py::test_widths\[(?!2816)",
  r"null/test_kernel_count\.py::test_(multiplying_is_counting\[(CUDA|METAL)|what_only_those_who_ask_pay\[METAL|what_metal_takes)",
  r"null/test_kernel_count\.py::test_(many\[ds2lite|(many|table|graphs_of_a_step)\[.*METAL|table\[(ds2lite-|youtu-CPU|kimi-|v3-|small-v3-CPU))",
  r"null/test_waits\.py::test_nothing_of_others_before_the_wait\[small-(ds-1|youtu|glm-4)",
  r"unit/test_against_wheel\.py::test_cpu\[([4-8]0|\d\d\d)\]",
  r"unit/test_gguf\.py::test_(models\[v3|full_vocabulary\[small-kimi)",
  r"unit/test_against_wheel\.py::test_metal",
  r"unit/test_against_wheel\.py::test_backward(\[|_counts\[.*)convolutions-",
  r"unit/test_bench\.py::test_(refusals\[bench_block\.py-args[345]|count_of_several|count_at_a_depth|bench_block_of_many|generic)",
  r"unit/test_serve_failing\.py::test_(a_device_that_breaks\[(one|layers)|no_room)",   # test_generate has the engine without room
  r"null/test_attention\.py::test_splits_combined_in_v_b\[(?!17-64|33-64).*-shape1\]",
  r"null/test_lora_query\.py::test_queries\[Shape\(heads=5, nope=64,",            # another has a K-quant
  r"null/test_lora_query\.py::test_queries\[Shape\(heads=(5, nope=192|2, nope=96).*tokens=1\)",   # the same of several tokens stays
  r"null/test_attention\.py::test_splits_of_several_combined_in_v_b\[lasts[02]-shape1",
  r"null/test_primitives\.py::test_form\[mixture shared IQ4_NL-CUDA-decode-2",
  r"null/test_attention\.py::test_splits_of_several_combined_in_v_b\[lasts[03]-shape0",
  r"null/test_primitives\.py::test_form\[(mixture shared-CUDA-pairs-2|mul_mat IQ4_NL-CUDA-decode-1|latent_attention 8 bits-CUDA-decode-2)",
  r"null/test_primitives\.py::test_(turns_of_a_large_launch\[((0|1|12|30)-101|8-64)|turns_of_parts\[8|floats_of_a_wide_vector\[30)",
  r"unit/test_sampling\.py::test_(nucleus\[(METAL-301|CUDA-)|the_total_of_a_row\[METAL)",   # test_primitives draws from nuclei there
  r"null/test_primitives\.py::test_form\[argmax (5 drawn from nuclei-(METAL|CPU-cpu_decode-7)|40001 drawn from nuclei-CPU-cpu_decode-7)",
  r"null/test_primitives\.py::test_form\[feed_forward dense-CUDA-decode-2",
  r"null/test_waits\.py::test_nothing_of_others_before_the_wait\[small-glm-1-greedy",   # the same launches before a cut stay
  r"null/test_prefill\.py::test_heads_factor_residual\[64x128-32",
  r"unit/test_against_wheel\.py::test_backward\[gradients-100-16",
  r"null/test_primitives\.py::test_(form\[attention few: of a block-CUDA-few-33|form\[mul_mat MXFP4-METAL|as_alone\[mixture shared IQ4_NL)",
  r"unit/test_speculate\.py::test_(on_a_mock\[on_metal|the_same_tokens\[1\])",   # rows of drafts are rows: test_many has METAL, test_mtp one
  r"unit/test_mtp\.py::test_launches\[METAL",
  r"null/test_prefill\.py::test_heads_factor_residual\[64x128-2\]",
  r"null/test_waits\.py::test_blocks_at_once_of_experts",     # test_blocks_at_once has one token's
  r"null/test_two_tokens\.py::test_two_are_as_one\[ds2lite",              # glm stays
  r"null/test_prefill\.py::test_(unabsorbed\[132-sm_89|chunks_that_are_not_absorbed\[(kimi|ds2lite))",   # glm-sm_90 stays
  r"null/test_primitives\.py::test_form\[mixture few: shared-CUDA-few-5",                                   # test_last_block_chooses has five
  # of three tokens one of four teams is idle; five by tensor cores choose in groups
  r"null/test_primitives\.py::test_(last_block_chooses\[(pairs-False-(1-4|2-2)|pairs-True|few-False)|blocks_that_are_counted_wrongly\[2)",
  r"null/test_prefill\.py::test_(head_rows\[(32-1|40-3)-.*sm_89|chunks_that_are_not_absorbed\[youtu)",   # sm_80's kernels, in less memory
  r"null/test_prefill\.py::test_(choice\[[12]-384|weights_as_halves\[Q4_1|attention_of_heads\[33-)",
  r"null/test_waits\.py::test_nothing_of_others_before_the_wait\[glm-2-greedy",  # test_choice_before_the_wait has two tokens
  r"null/test_primitives\.py::test_form\[mixture shared-CUDA-decode-1",    # test_choice_before_the_wait runs it
  r"null/test_primitives\.py::test_form\[(argmax 40001 drawn from nuclei-METAL|expert_down (IQ4_NL-CUDA|Q5_K shared-METAL))",
  r"null/test_primitives\.py::test_form\[expert_gate_up (Q4_1 softmax-CUDA-decode-3|F16 softmax of the chosen-CUDA-decode-2|Q6_K sigmoid-METAL)",
  r"null/test_primitives\.py::test_form\[(feed_forward few: dense-CUDA-few-16|latent_attention 2 heads at 0-METAL|norm_linear 34 rows-CUDA-decode-2)",
  r"unit/test_shard\.py::(test_two_cards|test_(drafts|a_planted_fault|experts_on_the_cpu|waiting|where_each_lies)\[(?!small-glm)|test_the_same_bytes\[small-ds)",
  r"unit/test_cpu\.py::test_feed_forward_of_few\[(?!13)",
  r"unit/test_cpu\.py::test_(norm_linear|attention)_of_few\[(kept\d-|\d+-\d+-)?(2|5|8|12|13)\]",
  r"unit/test_cpu\.py::test_feed_forward_of_many\[27\]",
  r"unit/test_cpu\.py::test_layout\[(1|37)-(?!Q4_0|Q6_K)",                     # test_layout[16-…] has every type
  r"unit/test_cpu\.py::test_packer\[(?!Q4_0|Q4_K|Q6_K|IQ4_XS)",                # test_primitives has the CPU's forms of them
  r"unit/test_cpu\.py::test_attention_of_many\[(61-5|130-3|0-70)-",
  r"unit/test_dequant_matvec\.py::test_every_type\[METAL-(?!Q4_0|Q6_K|IQ4_XS|F16)",
  r"unit/test_cpu\.py::test_mul_mat\[(5-48|29-23)-(?!Q4_0|Q6_K)",
  r"unit/test_engine\.py::test_random_schedules\[(1[5-9]|2\d)\d\]",
  r"unit/test_gguf_fuzz\.py::test_fuzz_templates",
  r"null/test_waits\.py::test_(nothing_of_others_before_the_wait\[glm-1-greedy|planted_faults\[2)",   # small-glm and one token's fault stay
  r"null/test_primitives\.py::test_(last_block_chooses\[pairs-False-3|form\[mixture lanes without a unit-CUDA-pairs)",   # few's last block stays
  r"null/test_lora_query\.py::test_queries\[Shape\(heads=2, nope=96, width=800",      # Q8_0's two tokens stay
  r"unit/test_fusion\.py::test_values\[(CUDA|METAL)",
  r"unit/test_many\.py::test_(together|too_few_pages)_on_a_mock",               # the schedules on the mocks are longer, and have few pages
  r"unit/test_many\.py::test_(.*on_a_mock\[CUDA-halves|probabilities_and_constraints_on_a_mock|rows_that_are_not_there_on_a_mock\[METAL)",
  r"unit/test_link\.py::test_many_at_once",                                     # test_serve_soak's clients are many, too
  r"unit/test_many\.py::test_probabilities_and_constraints\[small",
  r"unit/test_mtp\.py::test_on_a_mock",   # rows of drafts are on the mocks by test_speculate, and the block on the CPU
  r"unit/test_mtp\.py::test_what_it_drafts\[(3-|1-sampling[023])",
  r"unit/test_many\.py::test_a_host_that_sees_no_ids",
  r"unit/test_many\.py::test_(rows_that_are_not_there_on_a_mock|greedy\[built-in-0)",
  r"unit/test_mtp\.py::test_the_same_tokens\[4",                                # test_speculate has as many rows
  r"unit/test_dequant_matvec\.py::test_sums\[METAL",
  r"unit/test_mla\.py::test_kinds_of_files\[(softmax|Kimi|Moonlight)",
  r"unit/test_mla\.py::test_router_of_groups\[[13]",
  r"unit/test_mla\.py::test_every_type\[(.*-(9|18)|small-(ds|youtu)-0)\]",
  r"unit/test_oracle\.py::test_llama_cpp\[(Kimi|Moonlight|V3, )",
  r"unit/test_quantized\.py::test_uses\[(Q4_1|Q5_0|Q5_1|Q2_K|Q3_K|Q5_K|MXFP4|BF16|IQ4_NL|IQ4_XS|F32)\]",
  r"unit/test_sampling\.py::test_a_row_with_a_mask\[(CUDA|METAL|plain)",
  r"null/test_all_reduce\.py::test_a_(model|prompt)",
  # mla_prefill_heads stays
  r"null/test_prefill\.py::test_(several_prompts_in_one_step\[mla_prefill\]|experts\[sm_90-128-128|head_rows\[32-1-.*sm_80)",
  r"null/test_lora_query\.py::test_queries\[Shape\(heads=5, nope=192",           # two tokens of a row with codes stay
  r"null/test_primitives\.py::test_form\[(attention few: of a block-CUDA-few-3|next_token of a nucleus-CUDA-decode-1)",
  r"unit/test_cpu\.py::test_feed_forward_of_many\[17\]",
  r"unit/test_tensor_parallel\.py::test_(logits\[(ds|old|youtu)|a_planted_fault\[(the_first|without|heads))",
  r"unit/test_step\.py::test_two_sequences_at_different_positions",               # test_many's stand at all positions
  r"unit/test_sampling\.py::test_(many_mixes|features|odd_vocabularies|every_value_from_one_graph|a_fault_of_rows|cutoff\[(plain|CUDA))",
  r"unit/test_sampling\.py::test_a_row_of_a_batch_is_the_row_alone\[CUDA",
]

def pytest_addoption(parser: pytest.Parser) -> None: parser.addoption("--all", action="store_true", help="run what takes long, too")

def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if config.getoption("--all"): return
  slow = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in SLOW)]
  if slow:
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in {*slow}]
