//! All metrics there are, one row each: what is registered, described and documented comes from here.

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
        "Requests admitted and not ended.";
    WAITING: Gauge, Count, "tower_tenant_waiting", ["limiter"],
        "Requests in a line.";
    TRACKED: Gauge, Count, "tower_tenant_tracked", ["limiter"],
        "Tenants tracked.";
    ADMITTED: Counter, Count, "tower_tenant_admitted_total", ["limiter"],
        "Requests admitted.";
    REJECTED: Counter, Count, "tower_tenant_rejected_total", ["limiter", "reason"],
        "Requests rejected.";
    CANCELLED: Counter, Count, "tower_tenant_cancelled_total", ["limiter", "where"],
        "Requests dropped by their caller.";
    EXPIRED: Counter, Count, "tower_tenant_expired_total", ["limiter"],
        "Requests whose slot was taken back when its time was up.";
    WOULD_REJECT: Counter, Count, "tower_tenant_dry_run_rejected_total", ["limiter", "reason"],
        "Requests admitted that would have been rejected but for a dry run.";
    WOULD_QUEUE: Counter, Count, "tower_tenant_dry_run_queued_total", ["limiter"],
        "Requests admitted that would have had to wait but for a dry run.";
    EVICTED: Counter, Count, "tower_tenant_evicted_total", ["limiter"],
        "Tenants forgotten.";
    WAIT: Histogram, Seconds, "tower_tenant_wait_seconds", ["limiter"],
        "How long those requests waited that had to, however it ended.";
    HOLD: Histogram, Seconds, "tower_tenant_hold_seconds", ["limiter"],
        "How long slots were held.";
    TENANT_QUEUED: Counter, Count, "tower_tenant_tenant_queued_total", ["limiter", "tenant"],
        "Requests of the tenant that had to wait.";
    TENANT_REJECTED: Counter, Count, "tower_tenant_rejected_by_tenant_total", ["limiter", "tenant"],
        "Requests of the tenant that were rejected.";
}

impl Metric {
    /// A counter with the values of the labels, which is there with 0 before anything happens.
    pub(super) fn counter(&self, values: &[&str]) -> Counter {
        let counter = counter!(self.name, self.labels(values));
        counter.increment(0);
        counter
    }

    /// A gauge with the values of the labels, which is there before anything happens.
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

/// Tells the recorder what each metric means.
pub(super) fn describe() {
    ALL.iter().for_each(Metric::describe);
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    /// How a row reads in the documentation, up to what may be added to its last cell.
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

    /// The rows of `text` that are about a metric.
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
