//! The table of all metrics: the source of their registration, description and documentation.

use metrics::{
    Counter, Gauge, Histogram, Label, Unit, counter, describe_counter, describe_gauge,
    describe_histogram, gauge, histogram,
};

/// A row of the table.
pub(super) struct Metric {
    name: &'static str,
    kind: Kind,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

macro_rules! table {
    ($($row:ident: $kind:ident, $unit:ident, $name:literal, [$($label:literal),*], $help:literal;)*) => {
        $(pub(super) const $row: Metric = Metric {
            name: $name,
            kind: Kind::$kind,
            unit: Unit::$unit,
            labels: &[$($label),*],
            help: $help,
        };)*

        const ALL: &[Metric] = &[$($row),*];
    };
}

// The tables in the documentation of `Metrics` and `TenantMetrics` and in docs/operations.md are
// compared with this one by the tests below.
table! {
    IN_FLIGHT: Gauge, Count, "tower_tenant_in_flight", ["limiter"],
        "Requests in flight: admitted and not yet ended.";
    WAITING: Gauge, Count, "tower_tenant_waiting", ["limiter"],
        "Requests in a queue.";
    TRACKED: Gauge, Count, "tower_tenant_tracked", ["limiter"],
        "Tenants tracked.";
    ADMITTED: Counter, Count, "tower_tenant_admitted_total", ["limiter"],
        "Requests admitted.";
    REJECTED: Counter, Count, "tower_tenant_rejected_total", ["limiter", "reason"],
        "Requests rejected.";
    CANCELLED: Counter, Count, "tower_tenant_cancelled_total", ["limiter", "where"],
        "Requests that their caller dropped.";
    EXPIRED: Counter, Count, "tower_tenant_expired_total", ["limiter"],
        "Requests whose permit expired before they ended.";
    WOULD_REJECT: Counter, Count, "tower_tenant_dry_run_rejected_total", ["limiter", "reason"],
        "Requests that a dry run admitted and enforcement would have rejected.";
    WOULD_QUEUE: Counter, Count, "tower_tenant_dry_run_queued_total", ["limiter"],
        "Requests that a dry run admitted and enforcement would have queued.";
    EVICTED: Counter, Count, "tower_tenant_evicted_total", ["limiter"],
        "Tenants evicted.";
    WAIT: Histogram, Seconds, "tower_tenant_wait_seconds", ["limiter"],
        "How long queued requests waited, whatever the outcome.";
    HOLD: Histogram, Seconds, "tower_tenant_hold_seconds", ["limiter"],
        "How long permits were held.";
    TENANT_QUEUED: Counter, Count, "tower_tenant_tenant_queued_total", ["limiter", "tenant"],
        "Requests of the tenant that were queued.";
    TENANT_REJECTED: Counter, Count, "tower_tenant_rejected_by_tenant_total", ["limiter", "tenant"],
        "Requests of the tenant that were rejected.";
}

impl Metric {
    /// Registers a counter with these label values. It is exported with 0 from the start.
    pub(super) fn counter(&self, values: &[&str]) -> Counter {
        let counter = counter!(self.name, self.labels(values));
        counter.increment(0);
        counter
    }

    /// Registers a gauge with these label values. It is exported with 0 from the start.
    pub(super) fn gauge(&self, values: &[&str]) -> Gauge {
        let gauge = gauge!(self.name, self.labels(values));
        gauge.increment(0);
        gauge
    }

    pub(super) fn histogram(&self, values: &[&str]) -> Histogram {
        histogram!(self.name, self.labels(values))
    }

    fn labels(&self, values: &[&str]) -> Vec<Label> {
        let labels = self.labels.iter().zip(values);
        labels
            .map(|(label, value)| Label::new(*label, (*value).to_owned()))
            .collect()
    }

    fn describe(&self) {
        match self.kind {
            Kind::Counter => describe_counter!(self.name, self.unit, self.help),
            Kind::Gauge => describe_gauge!(self.name, self.unit, self.help),
            Kind::Histogram => describe_histogram!(self.name, self.unit, self.help),
        }
    }
}

/// Describes each metric to the recorder.
pub(super) fn describe() {
    ALL.iter().for_each(Metric::describe);
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    /// Returns the documented row of a metric, up to what may follow in its last cell.
    fn documented(metric: &Metric) -> String {
        let labels: Vec<_> = metric
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        let kind = format!("{:?}", metric.kind).to_lowercase();
        let (first, rest) = metric.help.split_at(1);
        let help = first.to_lowercase() + rest.trim_end_matches('.');
        format!(
            "| `{}` | {kind} | {} | {help}",
            metric.name,
            labels.join(", ")
        )
    }

    /// Returns the rows of `text` that document a metric.
    fn rows(text: &str) -> Vec<&str> {
        let lines = text.lines().map(|line| line.trim_start_matches("/// "));
        let rows = lines.filter(|line| line.starts_with("| `tower_tenant_"));
        rows.filter(|line| line.matches(" | ").count() == 3)
            .collect()
    }

    fn is_table(rows: &[&str], metrics: &[Metric]) {
        for (row, metric) in rows.iter().zip(metrics) {
            let documented = documented(metric);
            assert!(row.starts_with(&documented), "{row} is not {documented}");
        }
        assert_eq!(rows.len(), metrics.len());
    }

    #[test]
    fn the_documentation_has_each_row_of_the_table_and_no_other() {
        let of_all = rows(include_str!("mod.rs"));
        let of_tenants = rows(include_str!("tenants.rs"));
        is_table(&[of_all, of_tenants].concat(), ALL);
        is_table(&rows(include_str!("../../../docs/operations.md")), ALL);
    }

    #[test]
    fn the_guide_for_those_on_call_names_no_metric_and_no_label_that_is_not_in_the_table() {
        let guide = include_str!("../../../docs/operations.md");
        let mut named = 0;
        for code in guide.split('`').skip(1).step_by(2) {
            let (name, labels) = code.split_once('{').unwrap_or((code, ""));
            if !name.starts_with("tower_tenant_") && labels.is_empty() {
                continue;
            }
            named += 1;
            // A label alone is one of a metric that was named before.
            let mut metrics = ALL
                .iter()
                .filter(|metric| ["", metric.name].contains(&name));
            let label = labels.split_once('=').map(|(label, _)| label);
            let known =
                metrics.any(|metric| label.is_none_or(|label| metric.labels.contains(&label)));
            assert!(known, "{code}");
        }
        assert!(named > ALL.len());
    }

    #[test]
    fn no_two_rows_have_a_name() {
        let names: std::collections::HashSet<_> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len());
    }
}
