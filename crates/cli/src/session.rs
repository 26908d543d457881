//! A model opened for a command, and the device and engines it runs on.

use crate::args::Isa;
use crate::download::hub::{Hub, HubName};
use crate::generate::Defaults;
use crate::input::Prompt;
use crate::settings::Settings;
use crate::timed::{Clocked, OpTimes, Timed};
use crate::{download, identity, progress};
use anyhow::{Context, Result, bail};
use audit::Host;
use device::cpu::{CpuDevice, CpuOptions};
use device::hostile::HostileDevice;
use device::{BLOCK_TOKENS, Device, DeviceName, KernelFamily};
use device_cuda::{CudaDevice, Gpu, OpTime};
use engine::{Engine, EngineConfig, ModelFacts, Protection, Refusal};
use model::{
    ChatTemplate, DateTime, LoadError, Message, Model, ModelSource, RenderOptions, StreamDecoder,
    TextSource, Tokenizer,
};
use numerics::Profile;
use serde_json::{Value, json};
use std::ops::Deref;
use std::sync::{Arc, OnceLock, PoisonError};

/// A model's configuration, weights, tokenizer and template; nothing runs yet.
pub struct Opened {
    settings: Settings,
    model: Model,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    gpu: OnceLock<Arc<Gpu>>,
}

/// Whether a device notes where its time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// No.
    None,
    /// Where that costs nothing.
    Free,
    /// Even if no operation may overlap another then.
    Alone,
}

/// How much KV memory a command wants.
pub enum KvNeed {
    /// What the settings allow.
    Settings,
    /// This many blocks, if the settings allow as many.
    Blocks(usize),
}

impl Opened {
    /// Opens the model the settings name.
    pub fn open(settings: &Settings) -> Result<Self> {
        let model = match &settings.model.value {
            Some(name) => match ModelSource::parse(name) {
                Err(LoadError::NotFound { .. }) if HubName::parse(name).is_some() => {
                    from_hub(name, !settings.quiet)?
                }
                source => model::load(&source?)?,
            },
            None => {
                let path = download::default_model_path()?;
                if !path.is_file() {
                    bail!(
                        "no --model given, and the default model is not at {}; run: blocklock pull",
                        path.display()
                    );
                }
                model::load(&ModelSource::Gguf(path))?
            }
        };
        let (tokenizer, template) = text(&model)?;
        Ok(Self {
            settings: settings.clone(),
            model,
            tokenizer: tokenizer.map(Arc::new),
            template,
            gpu: OnceLock::new(),
        })
    }

    /// Settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What to call it.
    pub fn name(&self) -> &str {
        &self.model.name
    }

    /// Its tokenizer; synthetic models have none.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Its chat template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The facts engines schedule by.
    pub fn facts(&self) -> ModelFacts {
        ModelFacts::new(&self.model.config, self.settings.profile())
    }

    /// Token ids of a raw prompt.
    pub fn raw_ids(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        match (prompt, &self.tokenizer) {
            (Prompt::Ids(ids), _) => Ok(ids.clone()),
            (Prompt::Text(_), None) => {
                bail!(
                    "{} has no tokenizer, so a text cannot be its prompt; use --prompt-ids",
                    self.name()
                )
            }
            (Prompt::Text(text), Some(tokenizer)) => Ok(tokenizer.encode(text, true, true)?),
        }
    }

    /// Token ids of a prompt, as a user's turn where the request is a chat. Refuses what can't run.
    pub fn prompt_ids(&self, prompt: &Prompt, defaults: &Defaults) -> Result<Vec<u32>> {
        let ids = match prompt {
            Prompt::Text(text) if defaults.chat => {
                let mut messages: Vec<Message> = Vec::new();
                messages.extend(defaults.system.as_ref().map(|s| Message::new("system", s)));
                messages.push(Message::new("user", text));
                self.chat_ids(&messages, defaults.date)?
            }
            Prompt::Ids(_) if defaults.chat => {
                bail!("--chat needs a text, but token ids are given")
            }
            prompt => self.raw_ids(prompt)?,
        };
        self.check(&ids, defaults.max_tokens)?;
        Ok(ids)
    }

    /// Token ids of a conversation, up to where the assistant's turn begins.
    pub fn chat_ids(&self, messages: &[Message], date: Option<DateTime>) -> Result<Vec<u32>> {
        let (Some(template), Some(tokenizer)) = (&self.template, &self.tokenizer) else {
            bail!("{} has no chat template; use a raw prompt", self.name());
        };
        let options = RenderOptions {
            add_generation_prompt: true,
            date,
            ..RenderOptions::default()
        };
        Ok(template.encode(tokenizer, messages, &options)?)
    }

    /// What the engine would refuse whatever its load, found before anything is loaded.
    pub fn check(&self, ids: &[u32], max_tokens: usize) -> Result<()> {
        let facts = self.facts();
        let limit = facts.context.saturating_sub(usize::from(max_tokens > 0));
        if ids.is_empty() {
            return Err(Refusal::EmptyPrompt.into());
        }
        if ids.len() > limit {
            let given = ids.len();
            return Err(Refusal::PromptTooLong { given, limit }.into());
        }
        if let Some(position) = ids.iter().position(|&t| t as usize >= facts.vocab) {
            return Err(Refusal::UnknownToken {
                given: ids[position],
                position,
                vocab: facts.vocab,
            }
            .into());
        }
        Ok(())
    }

    /// Tokens that end an answer.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.tokenizer
            .as_ref()
            .map_or(Vec::new(), |t| t.eos().to_vec())
    }

    /// A token as text, special ones included; its id where there is no tokenizer.
    pub fn token_text(&self, id: u32) -> String {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(&[id], false),
            None => id.to_string(),
        }
    }

    /// Turns generated tokens into text as they come.
    pub fn stream_decoder(&self) -> Option<StreamDecoder> {
        self.tokenizer.as_ref().map(|_| StreamDecoder::new(true))
    }

    /// Bytes of keys and values a token takes.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let c = &self.model.config;
        if let Ok(DeviceName::Cuda(_)) = self.settings.device() {
            return (CudaDevice::kv_bytes(c, 1) / BLOCK_TOKENS) as u64;
        }
        let element = match self.settings.profile() {
            Profile::IeeeF32 => 4,
            Profile::HopperBf16 => 2,
        };
        (c.layers.len() * 2 * c.kv_heads * c.head_dim * element) as u64
    }

    /// The GPU that the settings name, opened once.
    fn gpu(&self, index: usize) -> Result<Arc<Gpu>> {
        if let Some(gpu) = self.gpu.get() {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Gpu::open(index, Some(crate::kernels::cache_folder()?))?);
        Ok(Arc::clone(self.gpu.get_or_init(|| gpu)))
    }

    /// KV blocks that the settings' memory, or what a GPU has left, holds: no more than running requests could ever use.
    pub fn kv_blocks(&self) -> Result<usize> {
        let block = self.kv_bytes_per_token() * BLOCK_TOKENS as u64;
        let memory = match (self.settings.kv_memory.value, self.settings.device()?) {
            (Some(bytes), _) => bytes,
            (None, DeviceName::Cuda(index)) => {
                let free = self.gpu(index)?.free_bytes()? as u64;
                let weights = CudaDevice::bytes(&self.model.weights) as u64;
                let left = left_for_kv(free, weights);
                if left < block {
                    bail!(
                        "cuda:{index}: {free} bytes are free and the weights take {weights}: too little is left for keys \
                         and values, {block} bytes a block of {BLOCK_TOKENS} tokens"
                    );
                }
                left
            }
            (None, _) => bail!("--kv-memory: only a GPU says how much it has"),
        };
        if memory < block {
            bail!(
                "--kv-memory {memory}: at least {block} bytes, one block of {BLOCK_TOKENS} tokens, are needed"
            );
        }
        let usable = self.model.config.context.div_ceil(BLOCK_TOKENS)
            * self.settings.max_running.value as usize;
        Ok(((memory / block) as usize).min(usable))
    }

    /// A CPU device of its own, for studies that disturb its steps; `None` where the settings ask for another device or
    /// profile.
    pub fn bare_cpu(&self, kv_blocks: usize) -> Result<Option<CpuDevice>> {
        let settings = &self.settings;
        if settings.device()? != DeviceName::Cpu || settings.profile() != Profile::IeeeF32 {
            return Ok(None);
        }
        let options = CpuOptions {
            threads: settings.threads.value as usize,
            isa: isa(settings.isa.value),
            kv_blocks,
            vendor: false,
        };
        let config = Arc::clone(&self.model.config);
        let device = CpuDevice::load(config, &self.model.weights, options);
        Ok(Some(device.context("cannot load the model on the CPU")?))
    }

    /// Loads the model onto the device, with the kernels these protections need.
    pub fn start(self, protections: &[Protection], need: KvNeed) -> Result<Session> {
        self.start_timed(protections, need, Timing::None)
    }

    /// The same; the device notes where its time goes.
    pub fn start_timed(
        self,
        protections: &[Protection],
        need: KvNeed,
        timed: Timing,
    ) -> Result<Session> {
        let allowed = self.kv_blocks()?;
        let kv_blocks = match need {
            KvNeed::Settings => allowed,
            KvNeed::Blocks(n) => n.clamp(1, allowed),
        };
        let profile = self.settings.profile();
        let config = Arc::clone(&self.model.config);
        let weights = &self.model.weights;
        let vendor = protections.iter().any(|&p| p != Protection::Invariant);
        let options = CpuOptions {
            threads: self.settings.threads.value as usize,
            isa: isa(self.settings.isa.value),
            kv_blocks,
            // Under the other profile a CPU refuses `none` request by request.
            vendor: vendor && profile == Profile::IeeeF32,
        };
        let times = OpTimes::default();
        let device: Box<dyn Device> = match self.settings.device()? {
            DeviceName::Cpu => {
                let mut device = device::cpu::load(profile, config, weights, options)
                    .context("cannot load the model on the CPU")?;
                device.time_operations(timed != Timing::None);
                let times = Arc::clone(&times);
                let clocked = Clocked::Cpu(device);
                Box::new(Timed { clocked, times })
            }
            DeviceName::Cuda(index) => {
                let gpu = self.gpu(index)?;
                let all = CudaDevice::bytes(weights) as u64;
                let bar = progress::bytes(self.settings.quiet, all, "to the GPU");
                let mut sent = |n| bar.inc(n as u64);
                let device = CudaDevice::new(gpu, config, weights, kv_blocks, vendor, &mut sent);
                bar.finish_and_clear();
                let mut device = device.context("cannot load the model on the GPU")?;
                device.time_operations(timed == Timing::Alone);
                let times = Arc::clone(&times);
                let clocked = Clocked::Cuda(Box::new(device));
                Box::new(Timed { clocked, times })
            }
            DeviceName::Hostile(orders) => {
                let device = HostileDevice::load(config, weights, options, orders)
                    .context("cannot load the model on the hostile device")?;
                Box::new(device)
            }
        };
        let host = Host::new(device, self.facts()).with_locked(self.settings.locked());
        Ok(Session {
            opened: self,
            host,
            times,
        })
    }
}

/// What of a GPU's free bytes may hold keys and values: a tenth is kept for activations, proofs and what else runs there.
fn left_for_kv(free: u64, weights: u64) -> u64 {
    (free / 10 * 9).saturating_sub(weights)
}

/// A hub's model, fetched unless it is in the cache.
fn from_hub(given: &str, progress: bool) -> Result<Model> {
    let name = HubName::parse(given).context("no model of a hub")?;
    let hub = Hub::of_process()?;
    let path = match hub.cached(&name) {
        Some(path) => path,
        None => {
            let pulled = hub.pull(&name, progress);
            pulled
                .with_context(|| format!("{given} is no file or directory here"))?
                .path
        }
    };
    let source = match path.is_dir() {
        true => ModelSource::Directory(path),
        false => ModelSource::Gguf(path),
    };
    let mut model = model::load(&source)?;
    model.name = given.to_owned();
    Ok(model)
}

/// The tokenizer and chat template that come with a model.
fn text(model: &Model) -> Result<(Option<Tokenizer>, Option<ChatTemplate>)> {
    let (tokenizer, template) = match &model.text {
        TextSource::None => return Ok((None, None)),
        TextSource::Gguf(metadata) => (
            Tokenizer::from_gguf_metadata(metadata)?,
            ChatTemplate::from_gguf_metadata(metadata)?,
        ),
        TextSource::Directory(folder) => {
            let path = folder.join("tokenizer.json");
            if !path.try_exists().unwrap_or(true) {
                tracing::warn!("there is no {}: prompts are token ids only", path.display());
                return Ok((None, None));
            }
            (
                Tokenizer::from_json_file(&path)?,
                ChatTemplate::from_dir(folder)?,
            )
        }
    };
    tokenizer.check_fits(model.config.vocab_size)?;
    let template = template.map(|t| t.with_tokens(&tokenizer));
    Ok((Some(tokenizer), template))
}

fn isa(isa: Isa) -> Option<device::cpu::Isa> {
    match isa {
        Isa::Auto => None,
        Isa::Avx512 => Some(device::cpu::Isa::Avx512),
        Isa::Avx2 => Some(device::cpu::Isa::Avx2),
        Isa::Neon => Some(device::cpu::Isa::Neon),
        Isa::Portable => Some(device::cpu::Isa::Portable),
    }
}

/// An opened model on its device.
pub struct Session {
    opened: Opened,
    host: Host,
    times: OpTimes,
}

impl Deref for Session {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

impl Session {
    /// The device, from which engines are made.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Tokenizer and template; the device lives on in its engines.
    pub fn into_text(self) -> (Option<Arc<Tokenizer>>, Option<ChatTemplate>) {
        (self.opened.tokenizer, self.opened.template)
    }

    /// Seconds by operation since the last call; zeros unless the session was started for timing.
    pub fn take_times(&self) -> Vec<OpTime> {
        std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A new engine.
    pub fn engine(&self, config: EngineConfig) -> Result<Engine> {
        Ok(self.host.engine(config)?)
    }

    /// What decides an `invariant` request's bits besides the request.
    pub fn numerics_id(&self) -> String {
        identity::numerics_id(&self.model, self.settings.profile()).to_string()
    }

    /// What also decides the bits of all other protections.
    pub fn environment_id(&self) -> String {
        identity::environment_id(&self.host.info(), &self.settings).to_string()
    }

    /// The part every JSON report begins with.
    pub fn describe(&self) -> Value {
        let info = self.host.info();
        json!({
            "model": self.name(),
            "device": info.name,
            "profile": self.settings.profile().name(),
            "numerics_version": numerics::NUMERICS_VERSION,
            "numerics_id": self.numerics_id(),
            "environment_id": self.environment_id(),
        })
    }

    /// The geometry a prompt's launches are certified as; `None` where nothing is to be certified.
    pub fn certified_as(&self, protection: Protection, prompt: usize) -> Option<String> {
        let planners = engine::protections::all(&self.facts(), &self.settings.locked());
        let (_, planner) = planners.into_iter().find(|(p, _)| *p == protection)?;
        Some(planner.certified_as(prompt)).filter(|name| !name.is_empty())
    }

    /// What a request's bits depend on beside itself, where its protection is a locked one: environment and geometry.
    pub fn locked_facts(&self, protection: Protection, prompt: usize) -> Option<(String, String)> {
        let planners = engine::protections::all(&self.facts(), &self.settings.locked());
        let (_, planner) = planners.into_iter().find(|(p, _)| *p == protection)?;
        let geometry = planner.geometry(prompt);
        (!geometry.is_empty()).then(|| (self.environment_id(), geometry))
    }

    /// The shapes a protection's launches have.
    pub fn geometry(&self, protection: Protection) -> Value {
        let (kernels, family) = match protection {
            Protection::Invariant => ("contract", KernelFamily::Contract),
            _ => ("vendor", KernelFamily::Vendor),
        };
        let locked = self.settings.locked();
        let decode = locked.decode_rows;
        let shapes = match protection {
            Protection::None | Protection::Invariant => "any: they follow the load".to_string(),
            Protection::Isolated => format!("the prompt alone; decode {decode} rows"),
            Protection::Rows => {
                format!(
                    "prefill {} rows of {:?}; decode {decode} rows",
                    locked.rows, locked.widths
                )
            }
            Protection::Pack => format!("prefill packs of {:?}; decode 1 row", locked.totals),
        };
        json!({
            "kernels": kernels,
            "available": self.host.supports(family),
            "shapes": shapes,
            "token_budget": self.settings.token_budget.value,
            "max_running": self.settings.max_running.value,
            "prefill_chunk": self.settings.prefill_chunk.value,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::left_for_kv;

    #[test]
    fn a_tenth_of_what_is_free_and_the_weights_are_kept_from_keys_and_values() {
        assert_eq!(left_for_kv(150_000, 16_000), 119_000);
        assert_eq!(left_for_kv(10_000, 9_000), 0);
        assert_eq!(left_for_kv(10_000, 9_001), 0);
        assert_eq!(left_for_kv(0, 1), 0);
    }
}
