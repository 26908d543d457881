//! Certification tells devices that keep a target's bits from those that don't.

use super::fake::fake_device;
use super::harness::FACTS;
use crate::Protection;
use crate::certify::{Certificate, CertifyError, blocks, certify};
use crate::config::LockedConfig;
use device::KernelFamily;

const LOCKED: [Protection; 3] = [Protection::Isolated, Protection::Rows, Protection::Pack];

fn locked() -> LockedConfig {
    LockedConfig {
        rows: 3,
        widths: vec![20, 64],
        decode_rows: 5,
        totals: vec![100, 300],
        kv_part: 64,
        ..LockedConfig::default()
    }
}

fn of(
    protection: Protection,
    prompt: usize,
    blocks: usize,
    row_sensitive: bool,
    leaky: bool,
) -> Result<Certificate, CertifyError> {
    let (mut device, log) = fake_device(blocks, &[KernelFamily::Vendor]);
    {
        let mut log = log.lock().unwrap();
        (log.row_sensitive, log.leaky, log.reads_filled) = (row_sensitive, leaky, true);
    }
    certify(&mut *device, &FACTS, &locked(), protection, prompt)
}

#[test]
fn a_device_whose_rows_are_independent_is_certified() {
    for protection in LOCKED {
        for prompt in [1, 20, 21, 64] {
            for row_sensitive in [false, true] {
                let c = of(protection, prompt, 200, row_sensitive, false).unwrap();
                assert_eq!(c.broken_by, None, "{protection} {prompt}");
                let shares = protection != Protection::Pack;
                assert_eq!(
                    c.equivariant,
                    shares && !row_sensitive,
                    "{protection} {prompt}"
                );
                assert!(!c.geometry.is_empty());
            }
        }
    }
}

#[test]
fn a_device_that_lets_neighbours_through_is_not() {
    for protection in LOCKED {
        let c = of(protection, 15, 200, false, true).unwrap();
        let shares = protection != Protection::Pack || c.geometry.contains("pack");
        assert!(shares);
        assert_eq!(
            c.broken_by.as_deref(),
            Some("ordinary neighbours"),
            "{protection}"
        );
        assert!(!c.equivariant);
    }
}

#[test]
fn a_device_whose_padding_gets_through_is_not() {
    for protection in LOCKED {
        let (mut device, log) = fake_device(200, &[KernelFamily::Vendor]);
        log.lock().unwrap().dummy_leaks = true;
        log.lock().unwrap().reads_filled = true;
        let c = certify(&mut *device, &FACTS, &locked(), protection, 15).unwrap();
        assert!(c.broken_by.is_some() && !c.equivariant, "{protection}");
    }
}

#[test]
fn certifying_takes_the_blocks_it_says() {
    for protection in LOCKED {
        for prompt in [1, 20, 21, 63, 64] {
            let needed = blocks(&FACTS, &locked(), protection, prompt);
            assert!(of(protection, prompt, needed, false, false).is_ok());
            let less = of(protection, prompt, needed - 1, false, false);
            assert!(
                less.is_err(),
                "{protection} {prompt}: {needed} are not needed"
            );
        }
    }
    assert_eq!(blocks(&FACTS, &locked(), Protection::Rows, 65), 0);
    assert_eq!(blocks(&FACTS, &locked(), Protection::Invariant, 5), 0);
}

#[test]
fn what_cannot_be_certified_says_why() {
    let error = |p, prompt, blocks| of(p, prompt, blocks, false, false).unwrap_err().to_string();
    assert!(error(Protection::Invariant, 5, 200).contains("no locked geometry"));
    assert!(error(Protection::None, 5, 200).contains("no locked geometry"));
    assert!(error(Protection::Rows, 65, 200).contains("holds 64"));
    assert!(error(Protection::Rows, 60, 2).contains("KV blocks"));
    let (mut device, _) = fake_device(200, &[KernelFamily::Contract]);
    let without = certify(&mut *device, &FACTS, &locked(), Protection::Rows, 5).unwrap_err();
    assert!(matches!(without, CertifyError::Refused(_)), "{without}");
    assert!(without.to_string().contains("without vendor kernels"));
}
