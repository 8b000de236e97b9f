package evernear;

import io.netty.buffer.Unpooled;
import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.handler.codec.http.DefaultFullHttpRequest;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.FullHttpResponse;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.util.ReferenceCountUtil;
import java.util.Map;

/**
 * GET /ready, which requires no token. Returns 200 if a prediction succeeded a moment ago, or if a stored query, which
 * is processed like any request, succeeds now.
 *
 * <p>Under load, the probe therefore adds no query, and a full queue does not make a working server unready.
 */
final class Probe extends ChannelDuplexHandler {
    /** Marks a probe's query, so that the handler does not count it. Removed from all other requests. */
    private static final String HEADER = "evernear-probe";

    private static final String MODEL = System.getProperty("evernear.model");

    private final Traffic traffic;
    private final byte[] query;
    private boolean probing;

    Probe(Traffic traffic, byte[] query) {
        this.traffic = traffic;
        this.query = query;
    }

    /** Whether the request is a probe, which has no body. */
    static boolean isProbe(HttpRequest request) {
        return request.uri().equals("/ready")
                && request.method().equals(HttpMethod.GET)
                && HttpUtil.getContentLength(request, 0L) == 0
                && !HttpUtil.isTransferEncodingChunked(request);
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        FullHttpRequest request = (FullHttpRequest) message;
        if (query == null || !isProbe(request)) {
            request.headers().remove(HEADER);
            context.fireChannelRead(message);
            return;
        }
        ReferenceCountUtil.release(message);
        if (traffic.hasRecentPrediction()) {
            context.writeAndFlush(response(HttpResponseStatus.OK));
            return;
        }
        FullHttpRequest prediction =
                new DefaultFullHttpRequest(
                        HttpVersion.HTTP_1_1, HttpMethod.POST, "/predictions/" + MODEL, Unpooled.wrappedBuffer(query));
        prediction.headers().set(HEADER, "1");
        HttpUtil.setContentLength(prediction, query.length);
        HttpUtil.setKeepAlive(prediction, HttpUtil.isKeepAlive(request));
        if (Token.get() != null) {
            prediction.headers().set(HttpHeaderNames.AUTHORIZATION, "Bearer " + Token.get());
        }
        probing = true;
        context.fireChannelRead(prediction);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (probing && message instanceof FullHttpResponse) {
            probing = false;
            HttpResponseStatus status = ((FullHttpResponse) message).status();
            ReferenceCountUtil.release(message);
            if (status.equals(HttpResponseStatus.OK)) {
                traffic.predictionSucceeded();
            }
            context.write(response(status), promise);
            return;
        }
        context.write(message, promise);
    }

    private static FullHttpResponse response(HttpResponseStatus status) {
        return status.equals(HttpResponseStatus.OK)
                ? Json.of(status, Map.of("status", "Ready"))
                : Rejection.of(
                        HttpResponseStatus.SERVICE_UNAVAILABLE,
                        "NotReady",
                        "A stored query got " + status + " instead of a prediction.");
    }
}
