//! A file written by another program (scripts/quant_fixture.py): metadata of every type, every tensor format.

use model::gguf::{Array, GgufFile, Value};
use numerics::weight::{WeightType, widen_row};
use std::path::Path;

fn open() -> GgufFile {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quants-gguf.bin");
    GgufFile::open(&path).unwrap()
}

#[test]
fn every_format_widens_to_the_other_programs_values() {
    let file = open();
    let bytes = file.storage.bytes();
    assert_eq!(file.tensors.len(), 22);
    let mut formats = 0;
    for (name, tensor) in file.tensors.iter().filter(|(n, _)| !n.ends_with(".f32")) {
        assert_eq!(
            (tensor.dtype.name(), &tensor.shape[..]),
            (name.as_str(), &[4, 256][..])
        );
        let expected = &file.tensors[&format!("{name}.f32")];
        assert_eq!(
            (expected.dtype, &expected.shape),
            (WeightType::F32, &tensor.shape)
        );
        let mut widened = vec![0f32; 1024];
        widen_row(tensor.dtype, &bytes[tensor.range.clone()], &mut widened);
        let mut values = vec![0f32; 1024];
        widen_row(WeightType::F32, &bytes[expected.range.clone()], &mut values);
        for (i, (a, b)) in widened.iter().zip(&values).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{name} element {i}: {a} and {b}");
        }
        formats += 1;
    }
    assert_eq!(formats, 11);
}

#[test]
fn metadata_of_every_type_is_read() {
    let m = open().metadata;
    for (name, value, array) in [
        ("uint8", Value::U8(200), Array::U8(vec![200; 2])),
        ("int8", Value::I8(-100), Array::I8(vec![-100; 2])),
        ("uint16", Value::U16(60_000), Array::U16(vec![60_000; 2])),
        ("int16", Value::I16(-30_000), Array::I16(vec![-30_000; 2])),
        (
            "uint32",
            Value::U32(4_000_000_000),
            Array::U32(vec![4_000_000_000; 2]),
        ),
        (
            "int32",
            Value::I32(-2_000_000_000),
            Array::I32(vec![-2_000_000_000; 2]),
        ),
        (
            "uint64",
            Value::U64((1 << 63) + 1),
            Array::U64(vec![(1 << 63) + 1; 2]),
        ),
        (
            "int64",
            Value::I64(-(1 << 62)),
            Array::I64(vec![-(1 << 62); 2]),
        ),
        ("float32", Value::F32(0.1), Array::F32(vec![0.1; 2])),
        ("float64", Value::F64(0.1), Array::F64(vec![0.1; 2])),
        ("bool", Value::Bool(true), Array::Bool(vec![true; 2])),
    ] {
        assert_eq!(m.get(&format!("value.{name}")), Some(&value));
        assert_eq!(m.get(&format!("array.{name}")), Some(&Value::Array(array)));
    }
    assert_eq!(m.get_str("value.string").unwrap(), Some("größe\n"));
    let strings = m.get_str_array("array.string").unwrap().unwrap();
    assert_eq!(strings, ["Ġa", "", "b c"]);
    let nested = vec![Array::I32(vec![1, 2]), Array::I32(vec![3])];
    assert_eq!(
        m.get("array.nested"),
        Some(&Value::Array(Array::Array(nested)))
    );

    // Getters take any width that fits and name the key otherwise.
    assert_eq!(m.get_u32("value.uint8").unwrap(), Some(200));
    assert_eq!(m.get_usize("value.uint64").unwrap(), Some((1 << 63) + 1));
    assert_eq!(
        m.get_i32_array("array.int8").unwrap(),
        Some(vec![-100, -100])
    );
    assert_eq!(
        m.get_u32_array("array.uint32").unwrap(),
        Some(vec![4_000_000_000; 2])
    );
    assert_eq!(m.get_f32("value.float64").unwrap(), Some(0.1));
    assert_eq!(m.get_f64("value.float32").unwrap(), Some(f64::from(0.1f32)));
    assert_eq!(m.get_bool("value.bool").unwrap(), Some(true));
    assert_eq!(
        m.get_f32_array("array.float32").unwrap(),
        Some(&[0.1f32, 0.1][..])
    );
    assert_eq!(m.get_u32("absent").unwrap(), None);
    let message = |e: model::gguf::GgufError| e.to_string();
    assert_eq!(
        m.get_u32("value.int8").map_err(message).unwrap_err(),
        "metadata key \"value.int8\" is i8 -100, allowed: an integer from 0 to 2^32-1"
    );
    assert_eq!(
        m.get_i32_array("array.uint32")
            .map_err(message)
            .unwrap_err(),
        "metadata key \"array.uint32\" is an array with 4000000000, allowed: an array of integers from -2^31 to 2^31-1"
    );
    assert_eq!(
        m.get_str("array.string").map_err(message).unwrap_err(),
        "metadata key \"array.string\" is an array of 3 strings, allowed: a string"
    );
    assert_eq!(
        m.get_bool("value.string").map_err(message).unwrap_err(),
        "metadata key \"value.string\" is string \"größe\\n\", allowed: a boolean"
    );
}
