//! Line plots as SVG: on white, so that they read in print and on a dark page alike; series told apart by colour (Okabe
//! and Ito's, safe for colour-blind eyes), dash and marker at once.
//!
//! The same numbers give the same bytes: plotters places everything on whole pixels and measures no font, and logarithms
//! are the `libm` crate's, taken here.

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// Blue, vermilion, green, purple, orange, sky blue, black.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];
const INK: RGBColor = RGBColor(34, 34, 34);
const GRID: RGBColor = RGBColor(221, 221, 221);
const WIDTH: u32 = 920;
const HEIGHT: u32 = 420;
const TITLE: u32 = 46;
const LEGEND: u32 = 230;
const LINE: u32 = 19;
/// Characters that a line of the caption holds.
const CAPTION: usize = 132;
/// Between the plot and its caption.
const GAP: u32 = 16;

/// A plot.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Its file's name, without `.svg`.
    pub file: String,
    /// What it shows.
    pub title: String,
    /// What it rests on, below it.
    pub caption: String,
    /// The axis to the right.
    pub x: Axis,
    /// The axis upwards.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
}

/// An axis.
#[derive(Debug, Clone)]
pub struct Axis {
    label: String,
    log: bool,
    range: (f64, f64),
    ticks: Vec<(f64, String)>,
}

/// A line of a plot.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name in the legend; empty: not there.
    pub name: String,
    /// Its points; those that an axis cannot show are left out, of [`Line::Pairs`] moved to its edge.
    pub points: Vec<(f64, f64)>,
    /// An index of colours and markers.
    pub style: usize,
    /// How points are joined.
    pub line: Line,
    /// Whether each point is marked.
    pub marked: bool,
}

/// How the points of a series are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Line {
    None,
    Solid,
    Dashed,
    /// Each two points, such as the ends of an interval, and no others.
    Pairs,
}

impl Axis {
    /// A logarithmic axis from 10^low to 10^high, a tick a decade, or every few where there are many.
    pub fn decades(label: impl Into<String>, low: i32, high: i32) -> Self {
        let high = high.max(low + 1);
        let each = ((high - low) as usize).div_ceil(10);
        let ticks = (low..=high).step_by(each).map(|e| (f64::from(e), power(e)));
        Self {
            label: label.into(),
            log: true,
            range: (f64::from(low), f64::from(high)),
            ticks: ticks.collect(),
        }
    }

    /// The decades that hold all positive values; one around 1 where there is none.
    pub fn decades_of(label: impl Into<String>, values: impl Iterator<Item = f64>) -> Self {
        let logs = values
            .filter(|&v| v > 0.0 && v.is_finite())
            .map(libm::log10);
        let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
            (low.min(v), high.max(v))
        });
        match low <= high {
            true => Self::decades(label, low.floor() as i32, high.ceil() as i32),
            false => Self::decades(label, -1, 0),
        }
    }

    /// A logarithmic axis with a tick at each of these values, ascending and above 0.
    pub fn at(label: impl Into<String>, values: &[f64]) -> Self {
        let ticks: Vec<(f64, String)> = values
            .iter()
            .map(|&v| (libm::log10(v), super::report::number(v)))
            .collect();
        let (low, high) = match (ticks.first(), ticks.last()) {
            (Some(low), Some(high)) if low.0 < high.0 => (low.0, high.0),
            (Some(one), _) => (one.0 - 0.5, one.0 + 0.5),
            _ => (0.0, 1.0),
        };
        let margin = 0.03 * (high - low);
        Self {
            label: label.into(),
            log: true,
            range: (low - margin, high + margin),
            ticks,
        }
    }

    /// An axis of whole numbers from 0 to `last`, with about ten ticks.
    pub fn whole(label: impl Into<String>, last: usize) -> Self {
        let last = last.max(1);
        let least = last.div_ceil(10);
        let each = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
        let each = each.into_iter().find(|&e| e >= least).unwrap_or(least);
        Self {
            label: label.into(),
            log: false,
            range: (-0.02 * last as f64, 1.02 * last as f64),
            ticks: (0..=last)
                .step_by(each)
                .map(|i| (i as f64, i.to_string()))
                .collect(),
        }
    }

    /// An axis from 0 to `high` in `parts` equal parts, as per cent.
    pub fn percent(label: impl Into<String>, high: f64, parts: u32) -> Self {
        let tick = |i: u32| {
            let v = high * f64::from(i) / f64::from(parts);
            (v, super::report::number((v * 1e8).round() / 1e6) + " %")
        };
        Self {
            label: label.into(),
            log: false,
            range: (0.0, high),
            ticks: (0..=parts).map(tick).collect(),
        }
    }

    /// Where a value lies, if the axis can show it.
    fn place(&self, value: f64) -> Option<f64> {
        let at = match self.log {
            true if value > 0.0 => libm::log10(value),
            true => return None,
            false => value,
        };
        let slack = 1e-9 * (self.range.1 - self.range.0);
        (self.range.0 - slack..=self.range.1 + slack)
            .contains(&at)
            .then_some(at)
    }

    /// Where a value lies, or the end of the axis that is nearer to it.
    fn clamped(&self, value: f64) -> f64 {
        let at = match self.log {
            true => libm::log10(value.max(f64::MIN_POSITIVE)),
            false => value,
        };
        at.clamp(self.range.0, self.range.1)
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, at: &f64, (first, last): (i32, i32)) -> i32 {
        let part = (at - self.range.0) / (self.range.1 - self.range.0);
        first + (part * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.iter().map(|t| t.0).collect(),
        }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, at: &f64) -> String {
        let tick = self.ticks.iter().find(|t| t.0 == *at);
        tick.map_or_else(String::new, |t| t.1.clone())
    }
}

/// 10 to a power, as people write it.
fn power(e: i32) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    match e {
        0 => "1".into(),
        1 => "10".into(),
        _ => e.to_string().chars().fold("10".into(), |text: String, c| {
            text + &c
                .to_digit(10)
                .map_or('⁻', |d| DIGITS[d as usize])
                .to_string()
        }),
    }
}

impl Plot {
    /// The picture.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|e| anyhow!("cannot draw {}: {e}", self.file))?;
        // What a screen reader says.
        let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
        let words = format!(
            "<title>{}</title>\n<desc>{}</desc>\n",
            escaped(&self.title),
            escaped(&self.caption)
        );
        let after = svg.find('\n').map_or(svg.len(), |end| end + 1);
        svg.insert_str(after, &words);
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Drawn {
        let caption = lines(&self.caption, CAPTION);
        let height = TITLE + HEIGHT + GAP + LINE * caption.len() as u32 + 8;
        let root = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let ink = |size: u32| ("sans-serif", size).into_font().color(&INK);
        let title = ("sans-serif", 22).into_font().style(FontStyle::Bold);
        root.draw(&Text::new(self.title.as_str(), (20, 14), title.color(&INK)))?;
        for (i, line) in caption.iter().enumerate() {
            let y = TITLE + HEIGHT + GAP + LINE * i as u32;
            root.draw(&Text::new(line.as_str(), (20, y as i32), ink(16)))?;
        }

        let area = root.clone().shrink((0, TITLE), (WIDTH - LEGEND, HEIGHT));
        let mut chart = ChartBuilder::on(&area)
            .margin_left(12)
            .margin_right(12)
            .x_label_area_size(56)
            .y_label_area_size(78)
            .build_cartesian_2d(self.x.clone(), self.y.clone())?;
        chart
            .configure_mesh()
            .x_desc(self.x.label.as_str())
            .y_desc(self.y.label.as_str())
            .axis_desc_style(ink(18))
            .label_style(ink(17))
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;

        for series in &self.series {
            let place = |&(x, y): &(f64, f64)| match series.line {
                Line::Pairs => Some((self.x.clamped(x), self.y.clamped(y))),
                _ => Some((self.x.place(x)?, self.y.place(y)?)),
            };
            let placed = series.points.iter().filter_map(place);
            let pixels: Vec<(i32, i32)> = placed.map(|p| chart.backend_coord(&p)).collect();
            series.lines(&root, &pixels)?;
            series.markers(&root, &pixels)?;
        }
        let named = self.series.iter().filter(|s| !s.name.is_empty());
        for (i, series) in named.enumerate() {
            let x = (WIDTH - LEGEND + 8) as i32;
            let y = TITLE as i32 + 16 + 24 * i as i32;
            series.lines(&root, &[(x, y), (x + 38, y)])?;
            series.markers(&root, &[(x + 19, y)])?;
            let name = Text::new(series.name.as_str(), (x + 48, y - 8), ink(16));
            root.draw(&name)?;
        }
        root.present()?;
        Ok(())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

impl Series {
    fn colour(&self) -> RGBColor {
        COLOURS[self.style % COLOURS.len()]
    }

    /// Joins pixels.
    fn lines(&self, area: &Area, pixels: &[(i32, i32)]) -> Drawn {
        let stroke = self.colour().stroke_width(2);
        let path = pixels.to_vec();
        match self.line {
            Line::None => {}
            Line::Solid => area.draw(&PathElement::new(path, stroke))?,
            Line::Dashed => area.draw(&DashedPathElement::new(path, 9, 5, stroke))?,
            Line::Pairs => {
                for pair in pixels.chunks(2) {
                    area.draw(&PathElement::new(pair.to_vec(), stroke))?;
                }
            }
        }
        Ok(())
    }

    /// Marks pixels. Shapes differ in size too, so that one on another is still seen.
    fn markers(&self, area: &Area, pixels: &[(i32, i32)]) -> Drawn {
        if !self.marked {
            return Ok(());
        }
        let fill = self.colour().filled();
        let stroke = self.colour().stroke_width(2);
        for &(x, y) in pixels {
            let around = |points: &[(i32, i32)]| -> Vec<(i32, i32)> {
                points.iter().map(|p| (x + p.0, y + p.1)).collect()
            };
            match self.style % 6 {
                0 => area.draw(&Circle::new((x, y), 4, fill))?,
                1 => {
                    let corners = [(-7, 5), (7, 5), (0, -8), (-7, 5)];
                    area.draw(&PathElement::new(around(&corners), stroke))?;
                }
                2 => {
                    let corners = [(-6, -6), (6, -6), (6, 6), (-6, 6), (-6, -6)];
                    area.draw(&PathElement::new(around(&corners), stroke))?;
                }
                3 => {
                    let corners = [(-5, 0), (0, 5), (5, 0), (0, -5)];
                    area.draw(&Polygon::new(around(&corners), fill))?;
                }
                4 => area.draw(&Cross::new((x, y), 5, stroke))?,
                _ => area.draw(&Circle::new((x, y), 7, stroke))?,
            }
        }
        Ok(())
    }
}

/// Text in lines of at most so many characters.
fn lines(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            file: "test".into(),
            title: "a < b & c".into(),
            caption: "word ".repeat(60),
            x: Axis::decades_of("gap", points.iter().map(|p| p.0)),
            y: Axis::percent("odds", 0.5, 5),
            series: vec![Series {
                name: "one".into(),
                points,
                style: 3,
                line: Line::Dashed,
                marked: true,
            }],
        }
    }

    #[test]
    fn a_picture_is_well_formed_and_the_same_again() {
        let points = vec![
            (1e-9, 0.5),
            (1e-5, 0.25),
            (1e-2, 0.0),
            (0.0, 0.1),
            (1e-3, 7.0),
        ];
        let svg = plot(points.clone()).svg().expect("a picture");
        assert_eq!(svg, plot(points).svg().expect("a picture"));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("<title>a &lt; b &amp; c</title>"));
        // Three points can be shown, and one stands in the legend.
        assert_eq!(svg.matches("<polygon").count(), 4);
        for text in ["10⁻⁹", "10⁻²", "50 %", "gap", "odds"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn an_interval_that_leaves_the_axis_is_cut_off_at_its_edge() {
        let mut bars = plot(vec![(1e-9, 0.1), (1e-9, 0.9)]);
        bars.series[0].line = Line::Pairs;
        bars.series[0].marked = false;
        let svg = bars.svg().expect("a picture");
        assert!(svg.contains("points=\"90,336 90,46 \""), "{svg}");
    }

    #[test]
    fn no_points_and_one_point_can_be_drawn() {
        plot(Vec::new()).svg().expect("a picture");
        plot(vec![(1e-3, 0.1)]).svg().expect("a picture");
        let mut one = plot(vec![(5.0, 0.1)]);
        one.x = Axis::at("tokens", &[5.0]);
        assert_eq!(one.svg().expect("a picture").matches("<polygon").count(), 2);
    }

    #[test]
    fn powers_of_ten() {
        assert_eq!(
            [power(-12), power(0), power(1), power(3)],
            ["10⁻¹²", "1", "10", "10³"]
        );
    }
}
