"""What `make test` has no time for on two cores, and leaves out: `make test ARGS=--all` runs it too. Each repeats, on another target, type, size or
number of rows, what a test that stays proves of the same code.

By file, patterns of the names of its tests. What is written behind one stays in place of it."""
SLOW = {
  "metal/test_decode": [
    r"test_the_tokens_of_the_cpu",   # test_many's schedules run on METAL, and test_msl judges each kernel
  ],
  "metal/test_msl": [
    r".*[\[-](IQ[123]_|TQ)",
    r"test_the_choice_(and_its_gate_up\[[13]|in_groups\[1)",
    r"test_(shapes|every_type)\[(Q5_0-16|Q8_0-33|Q4_0-17|Q[2345]_K|Q5_)",
  ],
  "null/test_all_reduce": [
    r"test_a_(model|prompt)",
    r"test_sums\[shapes[23]",
  ],
  "null/test_architectures": [
    r"test_(rendered|forward)",
  ],
  "null/test_attention": [
    r"test_tensor_cores\[shape([1-69]|10)-",
    r"test_few_blocks\[((0|1|15|63|127|400)-sm_86|(30|32)-)",
    r"test_new_rows_are_read_behind_the_wait\[((0|7|31|36)-1-|(0|60)-8-)",
    r"test_several_simt\[8-on_metal",
    r"test_several_by_tensor_cores\[(2-10|5-3)",
    r"test_rows_of_(several\[[39]|(several|a_prompt)\[.*on_metal)",
    r"test_splits_combined_in_v_b\[(?!17-64|33-64).*-shape1\]",
    r"test_splits_of_several_combined_in_v_b\[lasts[02]-shape1",
    r"test_splits_of_several_combined_in_v_b\[lasts[03]-shape0",
    r"test_(splits_of_several_combined_in_v_b\[lasts(2-shape0|1-shape1)|few_blocks\[(16|31)-|tensor_cores\[shape8|numbers_are_read_in_fours\[3)",
    r"test_(splits_of_several_left_out\[o(ne_turn|thers)|new_rows_are_read_behind_the_wait\[(100-3|120-8)|copies_that_nobody_waits_for\[400-one)",
    r"test_a_planted_fault\[.*(a_neighbours_item|without_the_last_item)",
  ],
  "null/test_cuda_decode": [
    r"test_decode",   # test_many's schedules run models on the mocks, too
    r"test_splits_left_out",   # test_attention's are, of the kernels alone
  ],
  "null/test_dequant_matvec": [
    r".*[\[-](IQ[123]_|TQ)",
  ],
  "null/test_few_tokens": [
    r"test_every_type\[(?!Q4_0|Q6_K)",
    r"test_(groups\[64-8-384|experts\[(16|33|2-4-7-8)|gate_up_beside_the_router\[.*-12-)",
    r"test_widths\[(?!2816)",
    r"test_(experts\[9|blocks_make_columns\[(8-736|5-2048))",
  ],
  "null/test_kernel_count": [
    r"test_(multiplying_is_counting\[(CUDA|METAL)|what_only_those_who_ask_pay\[METAL|what_metal_takes)",
    r"test_(many\[ds2lite|(many|table|graphs_of_a_step)\[.*METAL|table\[(ds2lite-|youtu-CPU|kimi-|v3-|small-v3-CPU))",
    r"test_many\[(youtu-CUDA-64|glm-CPU-8)\]",
    r"test_(many\[.*-CUDA-(2|4)\]|table\[(small-v3-CUDA|glm-CPU)|forced_drafts_are_judged_by_what_is_read\[0)",
  ],
  "null/test_lora_query": [
    r"test_queries\[Shape\(heads=5, nope=64,",   # another has a K-quant
    r"test_queries\[Shape\(heads=2, nope=96, width=800",   # Q8_0's two tokens stay
    r"test_queries\[Shape\(heads=5, nope=192",   # two tokens of a row with codes stay
    r"test_queries\[Shape\(heads=3, nope=(256|64, .*k_b=<GGMLQuantizationType\.Q4)",
  ],
  "null/test_mul_mat": [
    # test_primitives has every type on the mock of CUDA, and some on that of Metal
    r"test_(every_type|a_matrix_a_head\[(IQ4_NL|BF16))",
    r"test_shapes\[metal-",
    r"test_shapes\[cuda-(Q4_0-16-2048|Q4_0-1-4128|Q4_0-5-(992|5120)|Q5_0-6-1408|Q6_K-3-1536|F16-3-(4128|12800)|Q8_0-3-2816)\]",
    r"test_a_units_weights\[(IQ[123]_|TQ|Q3_K|Q5_|MXFP4).*-metal",
  ],
  "null/test_prefill": [
    r"test_every_type\[(?!Q4_K|Q8_0)",
    r"test_choice_in_groups\[.*256",
    r"test_(model|chunks_that_are_not_absorbed\[glm-sm_80)",   # test_many's schedules have prompts
    r"test_heads_factor_residual\[64x128-32",
    r"test_heads_factor_residual\[64x128-2\]",
    r"test_(unabsorbed\[132-sm_89|chunks_that_are_not_absorbed\[(kimi|ds2lite))",   # glm-sm_90 stays
    r"test_(head_rows\[(32-1|40-3)-.*sm_89|chunks_that_are_not_absorbed\[youtu)",   # sm_80's kernels, in less memory
    r"test_(choice\[[12]-384|weights_as_halves\[Q4_1|attention_of_heads\[33-)",
    r"test_(experts\[sm_90-128-128|head_rows\[32-1-.*sm_80)",
    r"test_several_prompts_in_one_step",   # test_prompts_that_share_a_chunk stays
    r"test_(experts\[sm_80|unabsorbed\[(132-sm_90|1-sm_90-sizes3)|head_rows\[(100-2-.*sm_8|40-3-.*sm_90))",
    r"test_(attention_of_heads\[19|kernels_have_no_more_than_they_use\[all|tiles_of_groups\[.*144|heads_factor_residual\[64x128-70)",
    r"test_(split_half\[(Q6_K-70-256|F32-64-512-sm_80)|choice\[(3-384|2-128)|gate_up\[sm_80|weights_as_halves\[Q(4_0|6_K)|launches\[2)",
  ],
  "null/test_primitives": [
    r"test_form\[mul_mat (IQ1_|IQ[23]_X|TQ).*-CUDA-",
    r"test_form\[mul_mat (IQ1_M|IQ2_X|IQ3_|TQ1).*-CPU-",
    r"test_as_alone\[.*-METAL-",
    r"test_(form|as_alone)\[.*-CUDA-decode-(5|7|8|9|19)\]",   # columns that tensor cores take but on cards without them
    r"test_form\[.*-CPU-cpu_few-(12|13)\]",
    r"test_form\[(?!mul_mat).*-CPU-cpu_prefill-",   # test_cpu's tests of many
    r"test_form\[.*-METAL-(decode-(2|3|4|5|8|9|19)|prefill-)",
    r"test_form\[(cutoff|likeliest|log_total|tell) .*-(METAL|CPU-cpu_decode-7)",
    r"test_form\[(norm_linear (34|96|rows that)|expert_down IQ4_NL|gate_up IQ4_XS).*-METAL-",
    r"test_form\[mixture (.*-CUDA-prefill-|two tokens-CUDA-|few: .*-(9|16)\])",
    r"test_form\[mul_mat (Q4_1|Q5_|Q2_K|Q3_K|IQ4_NL|MXFP4|BF16|F16).*-CPU-",
    r"test_form\[((likeliest|log_total) .*-CUDA-decode-3|latent_attention ([35] heads at|8 bits).*-CUDA-prefill-)",
    r"test_form\[mul_mat (?!Q4_0|Q6_K|MXFP4|a |id |many)[^-]*-METAL-",
    r"test_form\[norm_linear rows that grow-CUDA-(decode|prefill)",
    r"test_(choice_before_the_wait\[(two|in )|as_alone\[mixture two)",
    r"test_form\[(mixture|expert_gate_up) in groups",
    r"test_form\[mixture shared IQ4_NL-CUDA-pairs-2",
    r"test_form\[(mixture shared-CUDA-pairs-2|mul_mat IQ4_NL-CUDA-decode-1|latent_attention 8 bits-CUDA-decode-2)",
    r"test_(turns_of_a_large_launch\[((0|1|12|30)-101|8-64)|turns_of_parts\[8|floats_of_a_wide_vector\[30)",
    r"test_form\[argmax (5 drawn from nuclei-(METAL|CPU-cpu_decode-7)|40001 drawn from nuclei-CPU-cpu_decode-7)",
    r"test_form\[feed_forward dense-CUDA-decode-2",
    r"test_(form\[attention few: of a block-CUDA-few-33|form\[mul_mat MXFP4-METAL|as_alone\[mixture shared IQ4_NL)",
    # of three tokens one of four teams is idle; five by tensor cores choose in groups
    r"test_(last_block_chooses\[(pairs-False-(1-4|2-2)|pairs-True|few-False)|blocks_that_are_counted_wrongly\[2)",
    r"test_form\[mixture shared-CUDA-decode-1",   # test_choice_before_the_wait runs it
    r"test_form\[(argmax 40001 drawn from nuclei-METAL|expert_down (IQ4_NL-CUDA|Q5_K shared-METAL))",
    r"test_form\[expert_gate_up (Q4_1 softmax-CUDA-decode-3|F16 softmax of the chosen-CUDA-decode-2|Q6_K sigmoid-METAL)",
    r"test_form\[(feed_forward few: dense-CUDA-few-16|latent_attention 2 heads at 0-METAL|norm_linear 34 rows-CUDA-decode-2)",
    r"test_(last_block_chooses\[pairs-False-3|form\[mixture lanes without a unit-CUDA-pairs)",   # few's last block stays
    r"test_form\[(attention few: of a block-CUDA-few-3|next_token of a nucleus-CUDA-decode-1)",
    r"test_form\[(attention of a long chunk(, 8 bits)?|mixture few: shared)-CUDA",   # test_unabsorbed, test_last_block_chooses
    r"test_form\[(attention few: 8 bits|attention_output jobs of four rows|mul_mat MXFP4)-CUDA",
    r"test_form\[next_token of a nucleus-(CUDA-decode-3|METAL)",
    r"test_form\[(cutoff of a share|latent_attention 5 heads of several|expert_gate_up a unit that few lanes have)-CUDA-decode",
    r"test_form\[(norm_linear (33 rows|96 rows rotated)-CUDA-prefill-33|norm_linear rows that grow-CUDA-few)",
    r"test_form\[(latent_attention 8 bits|argmax 40001 drawn from nuclei)-CPU-cpu_decode-1",
    r"test_turns_of_a_large_launch\[14",
    r"test_one_token_of_a_wide_model",   # test_turns_of_parts has one
    r"test_form\[mixture shared-CUDA-pairs-3",   # test_choice_before_the_wait has pairs, test_sums_in_lanes three columns
    # test_cpu has these primitives' kernels, of one, few and many tokens
    r"test_form\[((gate_up|expert_gate_up|expert_down|latent_attention|embedding) |norm_linear (?!rows that)|mul_mat (id|many|a matrix)).*-CPU-",
  ],
  "null/test_two_tokens": [
    r"test_two_are_as_one\[ds2lite",   # glm stays
  ],
  "null/test_waits": [
    r"test_nothing_of_others_before_the_wait\[small-(ds-1|youtu|glm-4)",
    r"test_nothing_of_others_before_the_wait\[small-glm-1-greedy",   # the same launches before a cut stay
    r"test_blocks_at_once_of_experts",   # test_blocks_at_once has one token's
    r"test_nothing_of_others_before_the_wait\[glm-2-greedy",   # test_choice_before_the_wait has two tokens
    r"test_(nothing_of_others_before_the_wait\[glm-1-greedy|planted_faults\[2)",   # small-glm and one token's fault stay
    r"test_nothing_of_others_before_the_wait_of_a_few_tokens\[5",
  ],
  "unit/test_against_wheel": [
    r"test_cpu\[([4-8]0|\d\d\d)\]",
    r"test_metal",
    r"test_backward(\[|_counts\[.*)convolutions-",
    r"test_backward\[gradients-100-16",
    r"test_(cpu\[20|backward_counts\[CUDA)",
  ],
  "unit/test_bench": [
    r"test_(refusals\[bench_block\.py-args[13459]|count_of_several|count_at_a_depth|bench_block_of_many|generic)",
  ],
  "unit/test_cpu": [
    r".*[\[-](IQ[123]_|TQ)",   # test_rows_of_the_table has all of these types
    r"test_feed_forward_of_few\[(?!13)",
    r"test_(norm_linear|attention)_of_few\[(kept\d-|\d+-\d+-)?(2|5|8|12|13)\]",
    r"test_feed_forward_of_many\[27\]",
    r"test_layout\[(1|37)-(?!Q4_0|Q6_K)",   # test_layout[16-…] has every type
    r"test_packer\[(?!Q4_0|Q4_K|Q6_K|IQ4_XS)",   # test_primitives has the CPU's forms of them
    r"test_attention_of_many\[(61-5|130-3|0-70)-",
    r"test_mul_mat\[(5-48|29-23)-(?!Q4_0|Q6_K)",
    r"test_feed_forward_of_many\[17\]",
    r"test_(feed_forward_of_many\[2\]|norm_linear_of_few\[\d+-\d+-33|attention_of_few\[kept\d-33|norm_linear_of_many\[(12|2-24))",
    r"test_(few_as_alone_by_other_instructions\[(neither|\])|prefill_by_other_instructions\[\]|mul_mat_by_other_instructions\[neither-13)",
    r"test_attention_of_many\[0-2",
  ],
  "unit/test_dequant_matvec": [
    r"test_every_type\[METAL-(?!Q4_0|Q6_K|IQ4_XS|F16)",
    r"test_sums\[METAL",
  ],
  "unit/test_engine": [
    r"test_random_schedules\[[12]\d\d\]",
  ],
  "unit/test_fusion": [
    r"test_values\[(CUDA|METAL)",
  ],
  "unit/test_gguf": [
    r"test_(models\[v3|full_vocabulary\[small-kimi)",
  ],
  "unit/test_gguf_fuzz": [
    r"test_fuzz_templates",
  ],
  "unit/test_link": [
    r"test_many_at_once",   # test_serve_soak's clients are many, too
  ],
  "unit/test_many": [
    r"test_(together|too_few_pages)_on_a_mock",   # the schedules on the mocks are longer, and have few pages
    r"test_(.*on_a_mock\[CUDA-halves|probabilities_and_constraints_on_a_mock|rows_that_are_not_there_on_a_mock\[METAL)",
    r"test_probabilities_and_constraints\[small",
    r"test_a_host_that_sees_no_ids",
    r"test_(rows_that_are_not_there_on_a_mock|greedy\[built-in-0)",
    r"test_(greedy\[.*-[4-7]\d|sampling_by_rows\[.*-1\d)\]",   # the same by other seeds
  ],
  "unit/test_mla": [
    r"test_kinds_of_files\[(softmax|Kimi|Moonlight)",
    r"test_router_of_groups\[[13]",
    r"test_every_type\[(.*-(9|18)|small-(ds|youtu)-0)\]",
  ],
  "unit/test_mtp": [
    r"test_launches\[METAL",
    r"test_on_a_mock",   # rows of drafts are on the mocks by test_speculate, and the block on the CPU
    r"test_what_it_drafts\[(3-|1-sampling[023])",
    r"test_the_same_tokens\[4",   # test_speculate has as many rows
    r"test_what_it_says\[(YaRN|dense)",
  ],
  "unit/test_oracle": [
    r"test_llama_cpp\[(IQ1_S|IQ2_|IQ3_XXS|TQ2_0)",
    r"test_llama_cpp\[(Kimi|Moonlight|V3, )",
  ],
  "unit/test_quantized": [
    r"test_(uses\[(IQ[123]_|TQ)|bits\[(IQ[123]_(?!XS)|TQ)|planes_of_a_gpu\[(?!IQ1_M)(IQ[123]_|TQ))",
    r"test_uses\[(Q4_1|Q5_0|Q5_1|Q2_K|Q3_K|Q5_K|MXFP4|BF16|IQ4_NL|IQ4_XS|F32)\]",
    r"test_(bits\[(IQ2_XS|MXFP4|IQ4_XS)|uses\[Q4_K)",
  ],
  "unit/test_sampling": [
    r"test_(nucleus\[(METAL-301|CUDA-)|the_total_of_a_row\[METAL)",   # test_primitives draws from nuclei there
    r"test_a_row_with_a_mask\[(CUDA|METAL|plain)",
    r"test_(many_mixes|features|odd_vocabularies|every_value_from_one_graph|a_fault_of_rows|cutoff\[(plain|CUDA))",
    r"test_a_row_of_a_batch_is_the_row_alone\[CUDA",
    r"test_nucleus\[plain",
  ],
  "unit/test_serve_failing": [
    r"test_(a_device_that_breaks\[(one|layers)|no_room)",   # test_generate has the engine without room
  ],
  "unit/test_shard": [
    r"(test_two_cards|test_(drafts|a_planted_fault|experts_on_the_cpu|waiting|where_each_lies)\[(?!small-glm)|test_the_same_bytes\[small-ds)",
  ],
  "unit/test_speculate": [
    r"test_(on_a_mock\[on_metal|the_same_tokens\[1\])",   # rows of drafts are rows: test_many has METAL, test_mtp one
  ],
  "unit/test_step": [
    r"test_several_prompts_in_one_step",   # test_prefill's test_prompts_that_share_a_chunk stays
    r"test_two_sequences_at_different_positions",   # test_many's stand at all positions
    r"test_several_sequences_have_kernels\[2-METAL",
  ],
  "unit/test_tensor_parallel": [
    r"test_(logits\[(ds|old|youtu)|a_planted_fault\[(the_first|without|heads))",
  ],
}
