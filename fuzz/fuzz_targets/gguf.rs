#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    model::fuzzing::fuzz_gguf(data);
});
