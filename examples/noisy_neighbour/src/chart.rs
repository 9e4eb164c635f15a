//! The chart: each tenant's latency over time, a panel for each run.

use std::{error::Error, ops::Range, path::Path};

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    Run,
    load::{Answer, FLOOD, FLOOD_THERE, OUTSTANDING, QUIET, QUIET_THERE},
};

const SIZE: (u32, u32) = (1080, 380);
const INK: RGBColor = RGBColor(60, 60, 60);
const FLOOD_COLOUR: RGBColor = RGBColor(213, 94, 0);
const QUIET_COLOUR: RGBColor = RGBColor(0, 114, 178);
/// How many seconds one point of a line stands for.
const STEP: f64 = 0.2;
const MILLISECONDS: Range<f64> = 1.0..2000.0;

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, LogCoord<f64>>>;
type Drawn = Result<(), Box<dyn Error>>;

pub(crate) fn draw(runs: &[Run], path: &Path) -> Drawn {
    let canvas = SVGBackend::new(path, SIZE).into_drawing_area();
    canvas.fill(&WHITE)?;
    for (run, panel) in runs.iter().zip(canvas.split_evenly((1, runs.len()))) {
        draw_run(run, &panel)?;
    }
    canvas.present()?;
    Ok(())
}

fn draw_run(run: &Run, panel: &Panel<'_>) -> Drawn {
    let seconds = QUIET_THERE.start..FLOOD_THERE.end;
    let mut chart = ChartBuilder::on(panel)
        .caption(run.title(), text(19))
        .margin(8)
        .x_label_area_size(42)
        .y_label_area_size(58)
        .build_cartesian_2d(seconds, MILLISECONDS.log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style(text(14))
        .axis_desc_style(text(15))
        .x_desc("seconds")
        .x_labels(5)
        .x_label_formatter(&|second| format!("{second:.0}"))
        .y_desc("mean latency, ms")
        .y_label_formatter(&|milliseconds| format!("{milliseconds:.0}"))
        .draw()?;
    mark(&mut chart, FLOOD_THERE.start, "flood starts", HPos::Left)?;
    mark(&mut chart, QUIET_THERE.end, "quiet ones stop", HPos::Right)?;

    for tenant in QUIET {
        chart.draw_series(LineSeries::new(
            means(run, tenant, QUIET_THERE),
            QUIET_COLOUR.mix(0.7),
        ))?;
    }
    let flood = LineSeries::new(means(run, FLOOD, FLOOD_THERE), FLOOD_COLOUR.stroke_width(3));
    chart.draw_series(flood)?;
    explain(&mut chart)
}

/// Marks the moment at which something happens to the load.
fn mark(chart: &mut Chart<'_>, moment: f64, what: &str, side: HPos) -> Drawn {
    let line = [MILLISECONDS.start, MILLISECONDS.end].map(|y| (moment, y));
    chart.draw_series(DashedLineSeries::new(line, 3, 4, INK.mix(0.6).into()))?;
    let beside = if matches!(side, HPos::Left) {
        0.06
    } else {
        -0.06
    };
    let style = text(13).pos(Pos::new(side, VPos::Top));
    let at_the_top = (moment + beside, MILLISECONDS.end);
    chart.draw_series([Text::new(what.to_owned(), at_the_top, style)])?;
    Ok(())
}

/// Draws the legend.
fn explain(chart: &mut Chart<'_>) -> Drawn {
    let lines = [
        (FLOOD_COLOUR, format!("flood, {OUTSTANDING} outstanding")),
        (
            QUIET_COLOUR,
            format!("{} quiet tenants, 1 each", QUIET.len()),
        ),
    ];
    for (colour, what) in lines {
        let stroke = colour.stroke_width(3);
        chart
            .draw_series(LineSeries::new([], stroke))?
            .label(what)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], stroke));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .label_font(text(14))
        .background_style(WHITE)
        .draw()?;
    Ok(())
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// The mean latency of what the tenant was answered in each step while it was there.
fn means(run: &Run, tenant: &str, there: Range<f64>) -> Vec<(f64, f64)> {
    let of_tenant = |answer: &&Answer| answer.tenant == tenant && answer.worked.is_some();
    let served: Vec<_> = run.answers.iter().filter(of_tenant).collect();
    let steps = ((there.end - there.start) / STEP).round() as usize;
    let mean = |step| {
        let start = there.start + step as f64 * STEP;
        let in_step = |answer: &&&Answer| (start..start + STEP).contains(&answer.answered);
        let latencies = served.iter().filter(in_step).map(|answer| answer.latency());
        let (sum, count) = latencies.fold((0.0, 0), |(sum, count), one| (sum + one, count + 1));
        (count > 0).then(|| (start + STEP / 2.0, sum / f64::from(count) * 1e3))
    };
    (0..steps).filter_map(mean).collect()
}
