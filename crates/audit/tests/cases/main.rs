//! What users of other engines hit, each as a named test on the tiny model: an `invariant` request gives the same
//! tokens and Top-20 bits whatever happens around it. "Solo" is the target alone in a new engine with a cold cache.
//!
//! The public reports, and the tests that would fail here if the same were true of this engine. Some are in the crates
//! `numerics` (the contract), `device` (kernels), `engine` (the same logic on a cheap device, many more histories) and
//! `cli` (the built command). Tests named `soak_…` run under `make soak`.
//!
//! | report | what happened | tests |
//! |---|---|---|
//! | vllm#51902, vllm#47069 | another request's prefill changes the attention tile of a decoding one | `prefills_of_1_to_130_and_8192_beside_a_decode_at_group_sizes_1_2_4_7_8`, `a_prefill_landing_beside_a_decode_changes_nothing` |
//! | vllm#48271 | the norm's block size switches at 256 tokens | `rows_254_to_258_decode_alike`, `scoring_327_tokens_whole_equals_chunks_of_255` |
//! | vllm#55752 | a finished request's row crosses a bucket and changes the kernel | `neighbours_may_finish_and_cancel_at_every_step_around_8_16_32_64_rows`, `finished_neighbour_crossing_a_bucket_changes_nothing` |
//! | vllm#55131 | f32 silently ran as TF32 | `near_the_decoder_in_f64`, `products_are_chains_for_every_format_and_token_count`, `errors_are_within_the_stated_bounds` |
//! | vllm#28131 | equal eagerly, unequal under CUDA graphs | needs a GPU |
//! | vllm#40896, sglang#34683 | cold and warm prefix cache differ | `every_hit_length_by_block_gives_the_cold_bits`, `a_conversation_gives_the_same_bits_cold_and_warm` |
//! | vllm#42019 | scores of prompts depend on the order of requests | `eight_overlapping_prompts_score_alike_in_any_order`, `six_overlapping_prompts_score_alike_in_all_720_orders`, `eight_overlapping_scores_agree_in_all_40320_orders`, `soak_eight_overlapping_prompts_score_alike_in_all_40320_orders` |
//! | vllm#51226, flashinfer#4861 | a seed is ignored beside neighbours without one, or only the first is used | `a_seed_counts_whatever_the_neighbours_have`, `four_seeds_keep_their_answers_in_every_order` |
//! | vllm#11778 | log probabilities at batch 1 and N differ | `every_batch_size_from_256_to_1_decodes_prompts_of_1_17_513_and_4097_to_the_solo_bits`, `every_batch_size_from_1_to_256_prefills_prompts_of_1_17_513_and_4097_to_the_solo_bits` |
//! | sglang#19431 | answers differ past batch 8 | `batches_around_8_give_the_solo_bits` |
//! | sglang#31261 | an unsupported architecture runs, not deterministically | `gguf_that_is_not_a_model_we_run`, `safetensors_that_are_not_a_model_we_run` |
//! | sglang#33417 | the mask is split by query tile, a reduction by a size threshold | `a_cached_prefix_extended_by_1_to_257_tokens_gives_the_cold_bits`, `every_prompt_length_across_two_tiles_and_at_chunk_edges` |
//! | llama.cpp#7052, llama.cpp#6950 | eight slots give several texts for one prompt | `eight_identical_requests_give_one_answer` |
//! | llama.cpp#2838 | the first answer differs from repeats | `the_first_answer_equals_three_repeats_with_the_cache_on` |
//! | llama.cpp#7381 | a seed given over HTTP is ignored | `the_seed_in_force_is_reported` (the command); over HTTP the seed drawn is in the reply: `a_completion_has_the_shape_of_the_openai_api` |
//! | ollama#4990 | the first answer after loading differs | `three_calls_after_a_start_and_three_after_a_restart_give_one_answer` |
//! | candle#2031 | answers drift from the reference implementation's | `logits_are_those_of_transformers`, `near_the_decoder_in_f64`, `random_models_and_schedules_equal_the_reference`, `capital_of_france`, `a_little_girl`, `mean_nll_of_a_text` |
//! | pegainfer#414, pegainfer#628 | unsafe combinations of flags start silently | `every_pair_of_settings_gives_the_plain_bits_or_is_refused` |
//! | TensorRT-LLM#2474 | kernels chosen at build time vary | `a_restart_gives_the_same_answer`, `golden_bits_of_the_tiny_model` |
//! | tensorrtllm_backend#468 | concurrent distinct seeds give one text | `distinct_seeds_and_distinct_choices_give_distinct_answers` |
//! | mlx-lm#259 | using the cache changes logits | `trimming_the_cached_prompt_by_one_token_changes_nothing` |
//! | text-generation-inference#1678 | one and many GPUs differ | needs GPUs; threads: `one_two_and_more_threads_give_the_same_bits` |
//! | batch_invariant_ops#6 | two samples diverge within 4096 tokens | `thirty_shuffled_prompts_of_2048_tokens_in_batches_of_12_and_16`, `soak_thirty_shuffled_prompts_of_4096_tokens_in_batches_of_12_and_16` |

mod batch;
mod cache;
mod check;
mod long;
mod machine;
mod parity;
mod sampling;
mod scoring;
mod sizes;
mod soak;
mod support;
mod windows;

/// Sources of all crates, as one text.
fn sources(folder: &std::path::Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).expect("readable").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            *text += &std::fs::read_to_string(&path).expect("UTF-8");
        }
    }
}

#[test]
fn every_test_named_in_the_table_exists() {
    let mut text = String::new();
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    sources(&crates, &mut text);
    let table = include_str!("main.rs")
        .lines()
        .filter(|l| l.starts_with("//! |"));
    let names: Vec<&str> = table
        .flat_map(|l| l.split('`').skip(1).step_by(2))
        .collect();
    assert!(names.len() > 30, "{names:?}");
    for name in names {
        assert!(text.contains(&format!("fn {name}(")), "no test {name}");
    }
}
