"""The smoke set, `pytest -m smoke`: a few quick tests of each room, by file and name. What it leaves out is in the rooms.

Kept in one list, so that the set can be read, timed and held to its budget: 90 seconds on two cores, without a GPU or nvcc.
"""

from __future__ import annotations

SMOKE = {
    # operands
    "test_pairs.py": ["test_every_pair_of_values_occurs"],
    # reference
    "test_reference.py": ["test_the_reference_equals_python_integers_and_ieee_rounding"],
    # products: each kind on the CPU against the reference, and what is refused
    "test_scaled_mm.py": [
        "test_every_pair_of_options_equals_the_reference",
        "test_random_mixes_of_everything_equal_the_reference",
        "test_sizes_of_zero_give_empty_results_or_the_epilogue_of_zero",
    ],
    "test_batched.py": ["test_every_pair_of_vectors_equals_the_reference"],
    "test_grouped.py": ["test_every_pair_of_options_equals_the_loop", "test_what_is_wrong_is_refused_and_named"],
    "test_block_scaled.py": ["test_every_pair_of_layouts_has_the_bits_of_the_reference", "test_the_reference_is_the_sum_that_python_computes"],
    "test_zero_points.py": ["test_every_row_equals_the_definition", "test_a_prepared_weight_may_be_compiled_into_a_graph"],
    "test_descriptor.py": ["test_one_descriptor_serves_many_tensors", "test_a_descriptor_outlives_its_handle"],
    "test_refusals.py": ["test_vectors_of_the_wrong_shape_are_refused", "test_every_error_carries_its_own_status"],
    "test_default_device.py": ["test_grouped_and_block_scaled_products_do_not_depend_on_the_default_device"],
    # layers
    "test_linear.py": ["test_every_pair_of_options_equals_the_two_calls_of_the_reference"],
    # nn, models, integrations, parallel
    "test_nn_modules.py": ["test_a_linear_layer_has_the_bits_of_int8_linear"],
    "test_models_config.py": ["test_ignored_layers_and_overrides_are_found_by_name_and_pattern"],
    "test_models_checkpoints.py": ["test_every_scheme_survives"],
    "test_integrations.py": ["test_the_products_have_vllms_signatures_and_formula"],
    "test_parallel.py": ["test_rows_are_divided_in_order"],
    # cpu, rowwise
    "test_cpu_backend.py": ["test_every_memory_layout_is_honoured"],
    "test_norm.py": ["test_a_fused_quantizer_has_the_bits_of_the_chain_in_float32", "test_the_inverse_root_is_an_ieee_root_and_an_ieee_quotient"],
    "test_activation.py": ["test_every_gate_has_the_bits_of_the_reference"],
    "test_rope.py": ["test_heads_of_language_models_have_the_bits_of_the_reference"],
    "test_static.py": ["test_scales_that_are_not_numbers_give_the_bits_of_the_reference"],
    "test_quantize_block.py": ["test_a_block_is_what_quantize_int8_makes_of_it_alone"],
    # gguf
    "test_gguf_quantizers.py": ["test_rule_ggml_has_the_bits_of_the_gguf_package"],
    "test_gguf_products.py": ["test_the_stored_sum_is_used"],
    "test_gguf_linear.py": ["test_each_mode_is_its_product_transposed"],
    "test_gguf_files.py": ["test_every_tensor_has_its_name_its_shape_and_its_dtype"],
    # tables, jit
    "test_tables_sm90.py": ["test_every_architecture_table_has_no_problem_and_is_for_the_architecture_it_is_named_for"],
    "test_tables_loader.py": ["test_rows_are_read_with_their_defaults", "test_every_problem_of_a_file_is_reported_in_the_order_of_its_lines"],
    "test_build_codegen.py": ["test_every_row_and_dtype_has_a_source_and_a_symbol_of_its_own"],
    # core
    "test_core_import.py": ["test_the_import_touches_no_gpu_loads_no_library_and_imports_nothing_heavy"],
    "test_core_fake_gpu.py": ["test_every_layout_is_launched_with_what_gives_the_bits_of_the_reference"],
    "test_core_c_program.py": ["test_a_c_program_validates_on_a_machine_without_a_gpu"],
    # measure, bench, autotune
    "test_measure_record.py": ["test_geometric_mean", "test_a_file_is_written_whole_or_not_at_all"],
    "test_bench_report.py": ["test_a_document_survives_the_file"],
    "test_bench_path_report.py": ["test_a_goal_on_a_mean_is_met_if_every_mean_reaches_it_and_names_the_worst_case"],
    "test_autotune_choose.py": ["test_every_product_gets_its_fastest_row"],
    # robustness, schema, cli, docs
    "test_commands.py": ["test_an_error_is_text_on_stderr_and_with_json_one_document_on_stdout"],
    "test_schema_files.py": ["test_the_files_are_those_that_the_catalog_writes"],
    "test_schema_refusals.py": ["test_every_problem_is_reported_one_by_one"],
    "test_verify.py": ["test_verify_finds_every_result_equal"],
    "test_doctor.py": ["test_doctor_passes_where_the_cpu_backend_works"],
    "test_cli.py": ["test_the_version_is_told"],
    "test_docs_links.py": ["test_what_a_page_links_to_exists", "test_pages_that_sources_and_texts_name_exist"],
}
