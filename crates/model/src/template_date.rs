//! The date a template may ask for, given by the caller so that a rendering can be repeated.

use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// A point in time in the proleptic Gregorian calendar, without a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DateTime {
    /// Year.
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    /// 0 to 23.
    pub hour: u32,
    /// 0 to 59.
    pub minute: u32,
    /// 0 to 59.
    pub second: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

impl DateTime {
    /// From seconds since 1970-01-01 00:00 UTC, in UTC.
    pub fn from_unix(seconds: u64) -> Self {
        // The count of days restarts on 1 March 0000, so that leap days end a year, and 400-year eras repeat.
        let days = (seconds / 86_400) as i64 + 719_468;
        let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = (shifted_month + 2) % 12 + 1;
        let rest = (seconds % 86_400) as u32;
        Self {
            year: (era * 400 + year_of_era + i64::from(month <= 2)) as i32,
            month: month as u32,
            day: (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32,
            hour: rest / 3_600,
            minute: rest / 60 % 60,
            second: rest % 60,
        }
    }

    /// Midnight of a day written `YYYY-MM-DD`; `None` where it is not a day.
    pub fn parse_date(text: &str) -> Option<Self> {
        let mut parts = text.split('-').map(|p| p.parse::<u32>().ok());
        let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
        let date = Self {
            year: i32::try_from(year).ok().filter(|&y| y <= 9999)?,
            month,
            day,
            hour: 0,
            minute: 0,
            second: 0,
        };
        let ok = parts.next().is_none()
            && (1..=12).contains(&month)
            && (1..=date.days_in_month()).contains(&day);
        ok.then_some(date)
    }

    /// Midnight of the same day.
    pub fn midnight(&self) -> Self {
        Self {
            hour: 0,
            minute: 0,
            second: 0,
            ..*self
        }
    }

    fn days_in_month(&self) -> u32 {
        match self.month {
            2 if self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0) => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// Days since 1 January.
    fn day_of_year(&self) -> u32 {
        (1..self.month)
            .map(|month| Self { month, ..*self }.days_in_month())
            .sum::<u32>()
            + self.day
    }

    /// 0 for Sunday.
    fn weekday(&self) -> usize {
        // Days since 31 December of the year before 1, a Sunday.
        let before = i64::from(self.year) - 1;
        let years =
            before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400);
        (years + i64::from(self.day_of_year())).rem_euclid(7) as usize
    }

    /// Python's `strftime` in the C locale. Directives it does not know stay as they are.
    pub fn format(&self, format: &str) -> String {
        let month = MONTHS[(self.month as usize).clamp(1, 12) - 1];
        let day = DAYS[self.weekday()];
        let hour12 = (self.hour + 11) % 12 + 1;
        let mut out = String::new();
        let mut chars = format.chars().peekable();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            // "%-d" is "%d" without padding.
            let bare = chars.next_if_eq(&'-').is_some();
            let mut number = |value: u32, width: usize| {
                let width = if bare { 0 } else { width };
                let _ = write!(out, "{value:0width$}"); // Writing to a String cannot fail.
            };
            match chars.next() {
                Some('Y') => out.push_str(&format!("{:04}", self.year)),
                Some('y') => number(self.year.rem_euclid(100) as u32, 2),
                Some('m') => number(self.month, 2),
                Some('d') => number(self.day, 2),
                Some('e') => out.push_str(&format!("{:2}", self.day)),
                Some('j') => number(self.day_of_year(), 3),
                Some('H') => number(self.hour, 2),
                Some('I') => number(hour12, 2),
                Some('M') => number(self.minute, 2),
                Some('S') => number(self.second, 2),
                Some('p') => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
                Some('B') => out.push_str(month),
                Some('b' | 'h') => out.push_str(&month[..3]),
                Some('A') => out.push_str(day),
                Some('a') => out.push_str(&day[..3]),
                Some('F') => out.push_str(&self.format("%Y-%m-%d")),
                Some('T') => out.push_str(&self.format("%H:%M:%S")),
                Some('D') => out.push_str(&self.format("%m/%d/%y")),
                Some('R') => out.push_str(&self.format("%H:%M")),
                Some('%') => out.push('%'),
                other => {
                    out.push('%');
                    out.extend(bare.then_some('-'));
                    out.extend(other);
                }
            }
        }
        out
    }
}
