//! Settings in force: flags over the configuration file over defaults, each remembering where it came from.

use crate::args::{Global, Isa, ProfileArg, ProtectionArg};
use anyhow::{Context, Result, bail};
use device::DeviceName;
use engine::Protection;
use numerics::Profile;
use serde::{Deserialize, Serialize};

/// The configuration file. Every key is optional; unknown ones are refused.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Option<String>,
    device: Option<String>,
    profile: Option<ProfileArg>,
    threads: Option<u32>,
    isa: Option<Isa>,
    kv_memory: Option<String>,
    protection: Option<ProtectionArg>,
    token_budget: Option<u32>,
    max_running: Option<u32>,
    prefill_chunk: Option<u32>,
    prefix_cache: Option<bool>,
    rows: Option<u32>,
    row_widths: Option<Vec<u32>>,
    decode_rows: Option<u32>,
    pack_totals: Option<Vec<u32>>,
    pack_share: Option<u32>,
    kv_part: Option<u32>,
}

/// A value and where it came from: `flag`, `file` or `default`.
#[derive(Debug, Clone, Serialize)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Its origin.
    pub from: &'static str,
}

impl<T> Setting<T> {
    fn pick(flag: Option<T>, file: Option<T>, default: T) -> Self {
        let (value, from) = match (flag, file) {
            (Some(v), _) => (v, "flag"),
            (None, Some(v)) => (v, "file"),
            (None, None) => (default, "default"),
        };
        Self { value, from }
    }
}

/// Everything a command needs to load a model and run an engine.
#[derive(Debug, Clone, Serialize)]
pub struct Settings {
    /// `None`: the default model.
    pub model: Setting<Option<String>>,
    /// `cpu`, `cuda`, `cuda:N`, `hostile` or `hostile:rows`.
    pub device: Setting<String>,
    /// Arithmetic.
    pub profile: Setting<ProfileArg>,
    /// Worker threads.
    pub threads: Setting<u32>,
    /// Kernel path.
    pub isa: Setting<Isa>,
    /// Bytes for keys and values; `None`: what a GPU has left.
    pub kv_memory: Setting<Option<u64>>,
    /// Protection of requests that name none.
    pub protection: Setting<ProtectionArg>,
    /// Tokens a step may hold.
    pub token_budget: Setting<u32>,
    /// Requests that run at once.
    pub max_running: Setting<u32>,
    /// Prompt tokens of one request in a step; `None`: what the budget leaves.
    pub prefill_chunk: Setting<Option<u32>>,
    /// Whether prefixes are cached.
    pub prefix_cache: Setting<bool>,
    /// Rows of `rows`' prefill.
    pub rows: Setting<u32>,
    /// Their widths, ascending.
    pub row_widths: Setting<Vec<u32>>,
    /// Rows of a decode launch of `isolated` and `rows`.
    pub decode_rows: Setting<u32>,
    /// Totals of `pack`'s prefill, ascending.
    pub pack_totals: Setting<Vec<u32>>,
    /// While a `pack` target decodes, neighbours run in one of so many steps.
    pub pack_share: Setting<u32>,
    /// Positions of a KV part in locked launches.
    pub kv_part: Setting<u32>,
    /// No progress and no notes.
    #[serde(skip)]
    pub quiet: bool,
}

impl Settings {
    /// Reads the file, if one is given, and validates everything.
    pub fn resolve(flags: &Global) -> Result<Self> {
        let file = match &flags.config {
            None => File::default(),
            Some(path) => {
                let text = crate::input::read_text(path, 1 << 20)?;
                toml::from_str::<File>(&text)
                    .with_context(|| format!("configuration file {}", path.display()))?
            }
        };
        let in_file =
            |name: &str, value: Option<u32>, allowed: std::ops::RangeInclusive<u32>| match value
                .filter(|v| !allowed.contains(v))
            {
                Some(v) => bail!(
                    "configuration file: {name} is {v}, but must be {} to {}",
                    allowed.start(),
                    allowed.end()
                ),
                None => Ok(value),
            };
        let file_kv = match &file.kv_memory {
            None => None,
            Some(text) => match crate::values::size(text) {
                Ok(bytes) => Some(bytes),
                Err(allowed) => bail!("configuration file: kv_memory is '{text}': {allowed}"),
            },
        };
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let threads = in_file("threads", file.threads, 1..=1024)?;
        let chunk = in_file("prefill_chunk", file.prefill_chunk, 1..=1 << 20)?;
        let token_budget = in_file("token_budget", file.token_budget, 1..=1 << 20)?;
        let max_running = in_file("max_running", file.max_running, 1..=4096)?;
        let device = Setting::pick(flags.device.clone(), file.device, "cpu".into());
        // What the device computes natively, how many tokens fill it, and what it has for keys and values.
        let (native, budget, kv) = match name(&device.value)? {
            DeviceName::Cpu | DeviceName::Hostile(_) => (ProfileArg::IeeeF32, 512, Some(512 << 20)),
            DeviceName::Cuda(_) => (ProfileArg::HopperBf16, 8192, None),
        };
        let locked = engine::LockedConfig::default();
        let ladder = |rungs: &[usize]| rungs.iter().map(|&r| r as u32).collect::<Vec<_>>();
        let rows = in_file("rows", file.rows, 1..=256)?;
        let decode_rows = in_file("decode_rows", file.decode_rows, 1..=4096)?;
        let pack_share = in_file("pack_share", file.pack_share, 1..=1000)?;
        let kv_part = in_file("kv_part", file.kv_part, 64..=1 << 20)?;
        for (name, rungs) in [
            ("row_widths", &file.row_widths),
            ("pack_totals", &file.pack_totals),
        ] {
            for &rung in rungs.iter().flatten() {
                in_file(name, Some(rung), 1..=1 << 20)?;
            }
        }
        let settings = Self {
            model: Setting::pick(flags.model.clone().map(Some), file.model.map(Some), None),
            device,
            profile: Setting::pick(flags.profile, file.profile, native),
            threads: Setting::pick(flags.threads, threads, cores),
            isa: Setting::pick(flags.isa, file.isa, Isa::Auto),
            kv_memory: Setting::pick(flags.kv_memory.map(Some), file_kv.map(Some), kv),
            protection: Setting::pick(None, file.protection, ProtectionArg::Invariant),
            token_budget: Setting::pick(None, token_budget, budget),
            max_running: Setting::pick(None, max_running, 64),
            prefill_chunk: Setting::pick(None, chunk.map(Some), None),
            prefix_cache: Setting::pick(None, file.prefix_cache, true),
            rows: Setting::pick(None, rows, locked.rows as u32),
            row_widths: Setting::pick(None, file.row_widths, ladder(&locked.widths)),
            decode_rows: Setting::pick(None, decode_rows, locked.decode_rows as u32),
            pack_totals: Setting::pick(None, file.pack_totals, ladder(&locked.totals)),
            pack_share: Setting::pick(None, pack_share, locked.pack_share as u32),
            kv_part: Setting::pick(None, kv_part, locked.kv_part as u32),
            quiet: flags.quiet,
        };
        settings.validate()?;
        Ok(settings)
    }

    fn validate(&self) -> Result<()> {
        let only = match self.device()? {
            DeviceName::Cpu => None,
            DeviceName::Cuda(_) => Some(Profile::HopperBf16),
            DeviceName::Hostile(_) => Some(Profile::IeeeF32),
        };
        if let Some(only) = only.filter(|&only| only != self.profile()) {
            bail!(
                "--profile {}: not on --device {}; allowed there: {}",
                self.profile().name(),
                self.device.value,
                only.name()
            );
        }
        if self.max_running.value > self.token_budget.value {
            bail!(
                "configuration file: max_running is {}, but must be at most token_budget ({}), so that every running \
                 request can have a token a step",
                self.max_running.value,
                self.token_budget.value
            );
        }
        if let Err(e) = self.engine().validate() {
            bail!("configuration file: {e}");
        }
        Ok(())
    }

    /// The device.
    pub fn device(&self) -> Result<DeviceName> {
        name(&self.device.value)
    }

    /// The profile.
    pub fn profile(&self) -> Profile {
        match self.profile.value {
            ProfileArg::IeeeF32 => Profile::IeeeF32,
            ProfileArg::HopperBf16 => Profile::HopperBf16,
        }
    }

    /// The protections asked for, each once; by default all that the device has kernels for under this profile.
    pub fn protections(&self, asked: &[ProtectionArg]) -> Vec<Protection> {
        let mut list: Vec<Protection> = Vec::new();
        for &p in asked {
            if !list.contains(&p.into()) {
                list.push(p.into());
            }
        }
        match self.profile() {
            _ if !list.is_empty() => list,
            Profile::IeeeF32 => vec![Protection::None, Protection::Invariant],
            Profile::HopperBf16 => vec![Protection::Invariant],
        }
    }

    /// Geometries of the locked protections.
    pub fn locked(&self) -> engine::LockedConfig {
        let rungs = |s: &Setting<Vec<u32>>| s.value.iter().map(|&r| r as usize).collect();
        engine::LockedConfig {
            rows: self.rows.value as usize,
            widths: rungs(&self.row_widths),
            decode_rows: self.decode_rows.value as usize,
            totals: rungs(&self.pack_totals),
            pack_share: self.pack_share.value as usize,
            kv_part: self.kv_part.value as usize,
            ..engine::LockedConfig::default()
        }
    }

    /// The engine's limits.
    pub fn engine(&self) -> engine::EngineConfig {
        engine::EngineConfig {
            token_budget: self.token_budget.value as usize,
            max_running: self.max_running.value as usize,
            chunk: self.prefill_chunk.value.map(|c| c as usize),
            prefix_cache: self.prefix_cache.value,
            locked: self.locked(),
            ..engine::EngineConfig::default()
        }
    }
}

fn name(device: &str) -> Result<DeviceName> {
    device.parse().map_err(|e| anyhow::anyhow!("--device {e}"))
}

impl From<ProtectionArg> for Protection {
    fn from(p: ProtectionArg) -> Self {
        match p {
            ProtectionArg::None => Protection::None,
            ProtectionArg::Isolated => Protection::Isolated,
            ProtectionArg::Rows => Protection::Rows,
            ProtectionArg::Pack => Protection::Pack,
            ProtectionArg::Invariant => Protection::Invariant,
        }
    }
}

impl ProtectionArg {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        Protection::from(self).name()
    }
}
