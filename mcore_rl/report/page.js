"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const charts = [...document.querySelectorAll(".chart")];
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function layout() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("text"), size: 12 },
    xaxis: { ...axis, title: { text: "step", standoff: 6 }, tickformat: ",d" },
    yaxis: { ...axis, exponentformat: "power" },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("surface"), bordercolor: color("line"), font: { color: color("text") } },
    legend: { x: 0, y: 0, yanchor: "bottom", yref: "container", maxheight: 1 },
  };
}

function draw() {
  const themed = layout();
  charts.forEach((chart, number) => {
    const { data, layout: own } = figures[number];
    const { template, xaxis, yaxis, ...kept } = own;
    // Every name has a line below the chart, unless it is the chart's title.
    const title = chart.parentElement.querySelector("figcaption").textContent;
    const names = data.filter((trace) => trace.name && (data.length > 1 || trace.name !== title)).length;
    const margin = { l: 10, r: 10, t: 12, b: 44 + 19 * names };
    chart.style.height = `${290 + 19 * names}px`;
    const axes = { xaxis: { ...themed.xaxis, ...xaxis }, yaxis: { ...themed.yaxis, ...yaxis }, margin };
    Plotly.react(chart, data, { ...themed, showlegend: names > 0, ...kept, ...axes }, {
      // Dragging zooms, and a double click shows the whole chart again, so no toolbar is needed.
      displayModeBar: false, plotlyServerURL: "", responsive: true,
    });
  });
}
draw();
dark.addEventListener("change", draw);

const search = document.getElementById("search");
if (search) {
  const rows = [...document.querySelectorAll(".row")].map((row) => [row, row.textContent.toLowerCase()]);
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    let shown = 0;
    for (const [row, text] of rows) {
      row.hidden = !text.includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    document.getElementById("found").textContent = wanted ? `${shown} of ${rows.length}` : "";
  });
}
