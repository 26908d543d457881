//! Contract products of many tokens: of the vendor's kernels that are proven to be chains and of our own, the fastest.
//!
//! Before the first use of a geometry each algorithm that the library suggests for it, that does not split K and whose kind
//! was measured to be chains, is timed on this very machine, as are our own kernels. The fastest that gives the bits of our own
//! usual kernel on adversarial data is kept, provided that one of the library's gives them too. The library's heuristic alone
//! is no judge: asked for unsplit products it may put one first that takes five times as long as its seventh. Token counts are
//! rounded up to few geometries; the rows added are nobody's.

use crate::CudaError;
use crate::cublaslt::{CANDIDATES, CublasLt, Place, Plan, Shape};
use crate::gpu::Buffer;
use crate::launch::{self, Linear};
use std::collections::hash_map::Entry;

type Result<T> = std::result::Result<T, CudaError>;

/// How thoroughly a geometry is looked at before its first use, which waits for it: the more tokens, the longer a launch, and
/// the nearer to one another are the library's suggestions.
struct Effort {
    /// Suggestions of the library.
    candidates: usize,
    /// Timed launches of each; the quickest counts.
    rounds: usize,
    /// Our own kernels too, which are no match for more tokens.
    own: bool,
}

fn effort(tokens: usize) -> Effort {
    let (candidates, rounds, own) = match tokens {
        0..=512 => (CANDIDATES, 3, true),
        513..=1024 => (CANDIDATES, 2, false),
        _ => (CANDIDATES / 2, 1, false),
    };
    Effort {
        candidates,
        rounds,
        own,
    }
}

/// More than the caches hold: what is written between launches, whose weights a step would find in memory.
const FLUSH: usize = 128 << 20;

/// What our own kernels save by starting beside the one before them, which a launch timed alone does not show: 1 to 3.5
/// microseconds were measured.
const EARLY: f64 = 1.5e-6;

/// How a product is done.
pub(crate) enum Way {
    /// By an algorithm of the library.
    Library(Plan),
    /// By one of our own kernels.
    Own(&'static str),
}

/// A product on the data of a proof.
struct Proof<'a> {
    job: Linear<'a>,
    got: &'a Buffer,
    want: &'a Buffer,
    flush: &'a Buffer,
}

impl CublasLt {
    /// `y = x · Wᵀ` with the chain's bits. `false`: not done, since nothing is proven for this geometry or there is no room
    /// for the rows added.
    pub fn chain(&self, place: &Place, job: &Linear) -> Result<bool> {
        let tokens = rounded(job.tokens);
        let element = if job.wide { 4 } else { 2 };
        let fits = tokens * job.width * 2 <= job.x.bytes()
            && tokens * job.outputs * element <= job.y.bytes();
        if job.bias.is_some() || !job.width.is_multiple_of(8) || !fits {
            return Ok(false);
        }
        job.check()?;
        let shape = Shape::new(job, tokens, true);
        let mut chains = self.chains.borrow_mut();
        let way = match chains.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.fastest(shape)?),
        };
        match way {
            Some(way) => self.go(place, way, job).map(|()| true),
            None => Ok(false),
        }
    }

    fn go(&self, place: &Place, way: &Way, job: &Linear) -> Result<()> {
        match way {
            Way::Library(plan) => self.run(place, plan, job),
            Way::Own(kernel) => job.run(&place.gpu, kernel),
        }
    }

    /// The fastest way that gives our own kernel's bits, provided that one of the library's gives them too.
    fn fastest(&self, shape: Shape) -> Result<Option<Way>> {
        let (gpu, t, n, k) = (&self.proofs.gpu, shape.tokens, shape.outputs, shape.width);
        let element = if shape.wide { 4 } else { 2 };
        let room = |bytes| gpu.alloc(bytes, "the proof of a product");
        let buffers = (|| {
            Ok::<_, CudaError>([
                room(t * k * 2)?,
                room(n * k * 2)?,
                room(t * n * element)?,
                room(t * n * element)?,
                room(FLUSH)?,
            ])
        })();
        let [x, w, want, got, flush] = match buffers {
            Ok(buffers) => buffers,
            Err(CudaError::OutOfMemory { .. }) => {
                tracing::warn!(
                    "no memory to prove a product of {t} x {n} x {k}; our own kernel does it"
                );
                return Ok(None);
            }
            Err(other) => return Err(other),
        };
        launch::adverse(gpu, &x, t * k, k, 1)?;
        launch::adverse(gpu, &w, n * k, k, 2)?;
        gpu.synchronize()?; // our kernels read weights before the kernel before them has ended: nothing makes those in a step
        let job = |y| Linear {
            x: &x,
            w: &w,
            bias: None,
            y,
            wide: shape.wide,
            tokens: t,
            outputs: n,
            width: k,
        };
        job(&want).run(gpu, job(&want).best(gpu.multiprocessors()))?;
        let proof = Proof {
            job: job(&got),
            got: &got,
            want: &want,
            flush: &flush,
        };
        let effort = effort(t);
        let own = proof.job.candidates(gpu.multiprocessors()).into_iter();
        let mut ways: Vec<Way> = own.filter(|_| effort.own).map(Way::Own).collect();
        for candidate in 0..effort.candidates {
            let Ok(plan) = self.plan(shape, candidate) else {
                break; // there are no more
            };
            match self.is_chain(&plan)? {
                true => ways.push(Way::Library(plan)),
                false => self.destroy(&plan),
            }
        }
        let mut timed = self.times(ways, &proof, effort.rounds)?;
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let times = timed.iter().map(|(s, way)| format!("{way} {:.1}", s * 1e6));
        let times = times.collect::<Vec<_>>().join(", ");
        tracing::debug!("{t} x {n} x {k}, microseconds: {times}");
        let (mut best, mut vouched) = (None, false);
        for (_, way) in timed {
            let library = matches!(way, Way::Library(_));
            let needed = best.is_none() || (library && !vouched);
            if needed && self.agrees(&way, &proof)? {
                vouched |= library;
                if best.is_none() {
                    best = Some(way);
                    continue;
                }
            } else if needed {
                tracing::warn!("{way} for {t} x {n} x {k} gives other bits here; not used");
            }
            self.forget(way);
        }
        if !vouched {
            best.take().into_iter().for_each(|way| self.forget(way));
        }
        Ok(best)
    }

    /// Each way and the seconds of its quickest launch.
    fn times(&self, ways: Vec<Way>, proof: &Proof, rounds: usize) -> Result<Vec<(f64, Way)>> {
        let gpu = &self.proofs.gpu;
        let mut timed: Vec<(f64, Way)> = ways.into_iter().map(|w| (f64::INFINITY, w)).collect();
        for (_, way) in &timed {
            self.go(&self.proofs, way, &proof.job)?; // what loads its code
        }
        for round in 0..rounds {
            let best = timed.iter().map(|t| t.0).fold(f64::INFINITY, f64::min);
            for (least, way) in &mut timed {
                if round > 0 && *least > 2.0 * best {
                    continue; // hopeless, and long
                }
                gpu.fill(proof.flush, 0, FLUSH, 0)?;
                let seconds = gpu.seconds(|| self.go(&self.proofs, way, &proof.job))?;
                let early = match way {
                    Way::Own(_) => EARLY,
                    Way::Library(_) => 0.0,
                };
                *least = least.min(seconds - early);
            }
        }
        Ok(timed)
    }

    fn agrees(&self, way: &Way, proof: &Proof) -> Result<bool> {
        let gpu = &self.proofs.gpu;
        gpu.fill(proof.got, 0, proof.got.bytes(), 0xff)?;
        self.go(&self.proofs, way, &proof.job)?;
        launch::same(gpu, proof.want, proof.got, proof.got.bytes())
    }

    fn forget(&self, way: Way) {
        if let Way::Library(plan) = way {
            self.destroy(&plan);
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Library(plan) => write!(f, "cuBLASLt's candidate {}", plan.candidate),
            Self::Own(kernel) => f.write_str(kernel),
        }
    }
}

/// The token count whose geometry serves this one: at most an eighth more above 512, no more than the next power of two, and
/// none at which the library's unsplit products were found slow.
fn rounded(tokens: usize) -> usize {
    match tokens {
        0..=64 => 64,
        65..=256 => tokens.next_multiple_of(128),
        257..=1024 => tokens.next_multiple_of(64),
        _ => tokens.next_multiple_of(128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_counts_are_few_and_fit_the_next_power_of_two() {
        let mut seen = std::collections::HashSet::new();
        for tokens in 33..=8192usize {
            let r = rounded(tokens);
            assert!(
                tokens <= r && r <= tokens.next_power_of_two(),
                "{tokens}: {r}"
            );
            assert!(tokens <= 512 || r - tokens <= tokens / 8, "{tokens}: {r}");
            seen.insert(r);
        }
        assert!(seen.len() < 75, "{}", seen.len());
    }
}
